"""The snapshots that a peer serves to joiners: of a live state, written between its rounds and kept while read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from peer.protocol.lineage import Certificate
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.state.live_snapshot import LiveSnapshotter
from peer.swarm.state.owned_state import OwnedState
from peer.swarm.state.snapshot_file import DamagedError, SnapshotFile

log = logging.getLogger(__name__)
MAX_FILES = 2
MAX_AGE_ROUNDS = 4  # replaying one update of 8 bits costs an eighth of the snapshot's bytes, and a digest


class Snapshots(Protocol):
    """What a peer has to serve."""

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:
        """The snapshot of lineage id `wanted` if it is here, else the newest one, or a new one if a joiner that wants
        `from_round` or later is better served by it.
        """

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        """That snapshot, if it is here or is that of the current state."""

    async def digest(self, round: int, lineage_id: str) -> str | None:
        """Of the state of that round, at that lineage id, as far as this peer knows."""

    async def update(self, digest: str) -> Path | None:
        """The file of that update, if it is kept."""


class OneSnapshot:
    """A snapshot that never changes: the genesis state of a bootstrap."""

    def __init__(self, file: SnapshotFile) -> None:
        self._file = file

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:  # noqa: ARG002
        return self._file

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        return self._file if self._file.meta.lineage_id == lineage_id else None

    async def digest(self, round: int, lineage_id: str) -> str | None:  # noqa: ARG002
        """See `Snapshots`; of the genesis state that is its lineage id."""
        return lineage_id if self._file.meta.lineage_id == lineage_id else None

    async def update(self, digest: str) -> Path | None:  # noqa: ARG002
        """See `Snapshots`; none has been made."""
        return None


class SnapshotFiles:
    """The snapshot files of a live state, and none of an earlier process.

    Args:
        owned: the state; its history's folder holds the files.
    """

    def __init__(self, owned: OwnedState) -> None:
        self._owned, self._state = owned, owned.state
        self.priority = RoundPriority(owned.timing)
        self._writing = asyncio.Lock()
        self.files: list[SnapshotFile] = []
        for path in owned.history.folder.glob("snapshot*"):
            path.unlink(missing_ok=True)

    def _held(self, lineage_id: str | None) -> SnapshotFile | None:
        return next((file for file in self.files if file.meta.lineage_id == lineage_id), None)


class SnapshotCache(SnapshotFiles):
    """The snapshots of a live state: the two newest, and none before a joiner asks.

    A snapshot is written on demand, and serves all joiners that ask in the next MAX_AGE_ROUNDS rounds, so that donors
    hold the same one. Joiners replay the few updates since then. The next one is written to a second file, and from
    then on over the older of the two, unless that is being read. A donor that is asked for one of a later
    round than its own file, which another donor has, makes it of that file.

    Args:
        owned: the state; the rounds wait while it is held still, so it is held for the copy of one chunk at a time.
    """

    def __init__(self, owned: OwnedState) -> None:
        super().__init__(owned)
        self._history = owned.history
        self._snapshotter = LiveSnapshotter(owned, self, self.priority)

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:
        async with self._writing:
            self._forget_other_lineages()
            held = self._held(wanted)
            if held is None and wanted != self._state.lineage_id and self._is_fresh(from_round):
                held = self.files[-1]
            if held is None:
                await self._renew(self._snapshotter.of_state)
                held = self.files[-1] if self.files else None
            return held

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        if (held := self._held(lineage_id)) is not None:
            return held
        async with self._writing:
            self._forget_other_lineages()
            if self._held(lineage_id) is None:
                if (chain := self._onward(lineage_id)) is not None:
                    await self._renew(partial(self._snapshotter.of_file, self.files[-1], chain))
                elif self._state.lineage_id == lineage_id:
                    await self._renew(self._snapshotter.of_state)
            return self._held(lineage_id)

    async def digest(self, round: int, lineage_id: str) -> str | None:
        state, history = self._state, self._history
        if round < len(history.chain) and history.lineage_id(round) == lineage_id:
            return history.certified(round)
        digest = await self._owned.digest() if state.lineage_id == lineage_id else None
        return digest if self._owned.valid and state.lineage_id == lineage_id else None

    async def update(self, digest: str) -> Path | None:
        async with self._owned.still():  # a round that is on the chain may still be taking its step
            pass
        await self._owned.written()
        return await asyncio.to_thread(self._history.whole_update, digest)

    def _is_fresh(self, from_round: int) -> bool:
        """Whether the newest file is new enough; what rounds came while it was written does not make it old."""
        here = self._state.round
        return bool(self.files) and self.files[-1].finished_at >= max(min(from_round, here), here - MAX_AGE_ROUNDS)

    def _onward(self, lineage_id: str) -> list[Certificate] | None:
        """The few rounds that lead from the newest file to there, one of the last, if their updates are all kept."""
        if not self.files:
            return None
        history, file = self._history, self.files[-1].meta.round
        for round in range(max(file + 1, self._state.round - MAX_AGE_ROUNDS), file + MAX_AGE_ROUNDS + 1):
            if history.leads_through(round, lineage_id):
                chain = list(history.chain[file:round])
                kept = all(history.update(one.link.update_digest) is not None for one in chain[:-1])
                return chain if kept else None  # the last one may just be written
        return None

    def _forget_other_lineages(self) -> None:
        """Drop the files to which this peer's chain does not lead: a joiner could not verify them."""
        for file in tuple(self.files):
            there = self._history.leads_through(file.meta.round, file.meta.lineage_id)
            if not there or self._history.certified(file.meta.round) not in (None, file.digest):
                self._remove(file)

    async def clear(self) -> None:
        """The state was a wrong one, and so may be the files."""
        self._snapshotter.stop()
        async with self._writing:
            for file in tuple(self.files):
                self._remove(file)

    def _remove(self, file: SnapshotFile) -> None:
        self.files.remove(file)
        file.give_up()

    async def _renew(self, make: Callable[[], Awaitable[SnapshotFile | None]]) -> None:
        """Make one more file, if there is room for it: over the oldest one, where there are as many as may be."""
        if len(self.files) >= MAX_FILES:
            if self.files[0].in_use(self._owned.timing):
                return
            self.files.pop(0).give_up(self._snapshotter.spare)
        try:
            file = await make()
        except DamagedError as error:
            log.error("%s: it is not served any more", error)
            self._remove(self.files[-1])
        except OSError as error:
            log.warning("no snapshot for joiners: %s", error)
        else:
            if file is not None and await self._is_checked(file):
                self.files.append(file)

    async def _is_checked(self, file: SnapshotFile) -> bool:
        """Whether a file is what this peer computed, so that a memory fault of this machine is not served."""
        expected = None
        try:
            expected = await self.digest(file.meta.round, file.meta.lineage_id)
        finally:
            if file.digest != expected:
                file.path.unlink(missing_ok=True)
        if file.digest != expected and expected is not None:  # else this peer is on another lineage by now
            log.error("the state of round %d is not what it was when it was new; it is not served", file.meta.round)
        return file.digest == expected
