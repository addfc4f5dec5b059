"""What a peer has for joiners: snapshots of a state that goes on, written between its rounds and kept while read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from peer.outer.state import CHUNK, AnyUpdate, OuterState
from peer.outer.threads import beside
from peer.protocol.lineage import Certificate
from peer.swarm.courtesy import Courtesy
from peer.swarm.history import KEPT_UPDATES, History
from peer.swarm.snapshots import SnapshotFile, SnapshotWriter

log = logging.getLogger(__name__)
MAX_FILES = 2
MAX_AGE_ROUNDS = 4  # replaying one update of 8 bits costs an eighth of the snapshot's bytes, and a digest
MAX_CARRIED = 2 * MAX_AGE_ROUNDS  # rounds that a file is carried on by: what another donor's may be newer
PATIENT_ROUNDS = KEPT_UPDATES // 4  # for so many a snapshot that is being written lets rounds go first


class Snapshots(Protocol):
    """What a peer has to serve."""

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:
        """The snapshot of lineage id `wanted` if it is here, else the newest that there is, or that is worth writing
        for somebody who wants one of `from_round` or later.
        """

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        """That snapshot, if it is here or the state still stands there."""

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


class Shelf:
    """The snapshots of a state that goes on: the two newest, and none before somebody has asked.

    A snapshot is written when somebody asks, and serves everybody who asks in the next MAX_AGE_ROUNDS rounds: so that
    donors hold the same one. Joiners replay the few updates that have come since. The next one is written beside it,
    and from then on over the older of the two, unless somebody reads that. A donor that is asked for one of a later
    round than its own, which another donor has, carries its own on to there.

    Args:
        history: of the state; its folder holds the files.
        still: holds the state still; the rounds wait for it, so it is held for the copy of one chunk at a time.
        valid: whether the state is whole; asked while it is held still.
        digest: -> that of the state as it was when it was new.
        written: returns when the newest update is in its file.

    Attributes:
        courtesy: to be told of rounds, which go first.
    """

    def __init__(
        self,
        history: History,
        state: OuterState,
        still: Callable[[], AbstractAsyncContextManager[None]],
        valid: Callable[[], bool],
        digest: Callable[[], Awaitable[str]],
        written: Callable[[], Awaitable[None]],
    ) -> None:
        self.courtesy, self._written = Courtesy(), written
        self._history, self._state, self._still, self._valid, self._digest = history, state, still, valid, digest
        self._writing, self._spare = asyncio.Lock(), history.folder / "snapshot.tmp"
        self.files: list[SnapshotFile] = []
        for path in history.folder.glob("snapshot*"):  # of an earlier life
            path.unlink(missing_ok=True)

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:
        """See `Snapshots`."""
        async with self._writing:
            self._forget_other_lineages()
            held = None if wanted is None else await self._made(wanted)
            if held is None and wanted != self._state.lineage_id and self._is_fresh(from_round):
                held = self.files[-1]
            if held is None:
                await self._renew(self._copy)
                held = self.files[-1] if self.files else None
            return held

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        """See `Snapshots`."""
        if (held := self._held(lineage_id)) is not None:
            return held
        async with self._writing:
            held = await self._made(lineage_id)
            if held is None and self._state.lineage_id == lineage_id:
                await self._renew(self._copy)
            return held or self._held(lineage_id)

    async def digest(self, round: int, lineage_id: str) -> str | None:
        """See `Snapshots`."""
        state, history = self._state, self._history
        if round < len(history.chain) and history.lineage_id(round) == lineage_id:
            return history.certified(round)
        digest = await self._digest() if state.lineage_id == lineage_id else None
        return digest if self._valid() and state.lineage_id == lineage_id else None

    async def update(self, digest: str) -> Path | None:
        """See `Snapshots`."""
        async with self._still():  # a round that is on the chain may still be taking its step
            pass
        await self._written()
        return await asyncio.to_thread(self._history.whole_update, digest)

    def _held(self, lineage_id: str | None) -> SnapshotFile | None:
        return next((file for file in self.files if file.meta.lineage_id == lineage_id), None)

    def _is_fresh(self, from_round: int) -> bool:
        """Whether the newest file is new enough."""
        here = self._state.round
        return bool(self.files) and self.files[-1].meta.round >= max(min(from_round, here), here - MAX_AGE_ROUNDS)

    def _forget_other_lineages(self) -> None:
        """This peer's chain does not lead to their files, or not any more: whoever fetched one could not verify it."""
        for file in tuple(self.files):
            there = self._leads_on(file.meta.round, file.meta.lineage_id)
            if not there or self._history.certified(file.meta.round) not in (None, file.digest):
                self._remove(file)

    async def clear(self) -> None:
        """The state was a wrong one, and so may be the files."""
        async with self._writing:
            for file in tuple(self.files):
                self._remove(file)

    def _remove(self, file: SnapshotFile) -> None:
        self.files.remove(file)
        file.give_up()

    async def _made(self, lineage_id: str) -> SnapshotFile | None:
        """That snapshot, if it is here or can be made of the newest one that is."""
        if (held := self._held(lineage_id)) is None and self.files:
            newest, history = self.files[-1], self._history
            for round in range(newest.meta.round + 1, min(newest.meta.round + MAX_CARRIED, len(history.chain)) + 1):
                if history.lineage_id(round) == lineage_id:
                    await self._renew(partial(self._copy_file, newest, round))
        return held or self._held(lineage_id)

    async def _renew(self, fill: Callable[[SnapshotWriter], Awaitable[int | None]]) -> None:
        """Write one more file, if there is room for it: over the oldest one, where there are as many as may be.

        Args:
            fill: puts all columns into it; -> the round that they are to be of, None for no file.
        """
        if len(self.files) >= MAX_FILES:
            if self.files[0].in_use:
                return
            self.files.pop(0).give_up(self._spare)
        with SnapshotWriter(self._spare, self._state) as writer:
            round = await fill(writer)
            if round is None or (lineage_id := await self._carry_on(writer, round)) is None:
                return
            file = writer.finish(self._history.folder / f"snapshot-{lineage_id[:16]}.bin", lineage_id)
        if (checked := await self._checked(file)) is not None:
            self.files.append(checked)

    async def _copy(self, writer: SnapshotWriter) -> int | None:
        """Copy the state column by column, between rounds or in them; None where it leaves its lineage, or is not
        whole.
        """
        began = self._state.round, self._state.lineage_id
        for column in writer.columns:
            async with self._turn(writer):
                async with self._still():
                    if not self._valid() or not self._leads_on(*began):
                        return None
                    await beside(CHUNK, writer.copy, column)
                await asyncio.to_thread(writer.put, column)
        return max(writer.rounds.values())

    async def _copy_file(self, file: SnapshotFile, round: int, writer: SnapshotWriter) -> int:
        """Copy a file that is here, to be carried on to that round."""
        with file.reading() as descriptor:
            for column in writer.columns:
                async with self._turn(writer):
                    await asyncio.to_thread(writer.copy_from, column, descriptor, file.meta.round)
                    await asyncio.to_thread(writer.put, column)
        return round

    async def _carry_on(self, writer: SnapshotWriter, round: int) -> str | None:
        """Bring every column to that round; -> where it stands then, None where an update is not kept any more."""
        first, history = min(writer.rounds.values()), self._history
        lineage_id, chain = history.lineage_id(round), history.chain[first:round]
        for certificate in chain:
            update = await self._kept(certificate)
            if update is None:
                log.info("no snapshot: the update of round %d is not kept any more", certificate.link.round + 1)
                return None
            for column in (one for one, at in writer.rounds.items() if at == certificate.link.round):
                async with self._turn(writer):
                    await asyncio.to_thread(writer.carry_on, column, update)
        return lineage_id

    async def _kept(self, certificate: Certificate) -> AnyUpdate | None:
        link = certificate.link
        path = await self.update(link.update_digest)
        with contextlib.suppress(FileNotFoundError):  # it was one of the oldest
            if path is not None:
                payload, weights = await asyncio.to_thread(path.read_bytes), [member.tokens for member in link.roster]
                return await asyncio.to_thread(self._state.split_update, payload, weights, link.round)
        return None

    def _leads_on(self, round: int, lineage_id: str) -> bool:
        """Whether the state's lineage goes through there."""
        history = self._history
        return round <= len(history.chain) and history.lineage_id(round) == lineage_id

    def _turn(self, writer: SnapshotWriter) -> contextlib.AbstractAsyncContextManager[None]:
        """Rounds go first, unless there have been so many that the updates to carry columns on would be gone."""
        late = self._state.round - min(writer.rounds.values(), default=self._state.round) > PATIENT_ROUNDS
        return contextlib.nullcontext() if late else self.courtesy.turn()

    async def _checked(self, file: SnapshotFile) -> SnapshotFile | None:
        """Nothing else is served than what this peer computed, not even after a fault of this machine's memory."""
        expected = await self.digest(file.meta.round, file.meta.lineage_id)
        if file.digest == expected:
            return file
        if expected is not None:  # else this peer is on another lineage by now
            log.error("the state of round %d is not what it was when it was new; it is not served", file.meta.round)
        file.path.unlink(missing_ok=True)
        return None
