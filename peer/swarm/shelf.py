"""What a peer has for joiners: snapshots of a state that goes on, written between its rounds and kept while read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from peer.outer.state import OuterState
from peer.swarm.courtesy import Courtesy
from peer.swarm.history import History
from peer.swarm.snapshots import SnapshotFile, SnapshotWriter

log = logging.getLogger(__name__)
MAX_FILES = 2
MAX_AGE_ROUNDS = 4  # replaying one update of 8 bits costs an eighth of the snapshot's bytes, and a digest


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
    and from then on over the older of the two, unless somebody reads that.

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
            held = self._held(wanted)
            if held is None and wanted != self._state.lineage_id and self._is_fresh(from_round):
                held = self.files[-1]
            if held is None:
                await self._renew(insist=not self._is_fresh(0))  # no round waits while there is one to serve
                held = self.files[-1] if self.files else None
            return held

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        """See `Snapshots`. Whoever asks has an offer from another donor: no round waits for a file here."""
        if (held := self._held(lineage_id)) is not None:
            return held
        async with self._writing:
            if self._held(lineage_id) is None and self._state.lineage_id == lineage_id:
                await self._renew(insist=False)
            return self._held(lineage_id)

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
            round, history = file.meta.round, self._history
            there = round <= len(history.chain) and history.lineage_id(round) == file.meta.lineage_id
            if not there or history.certified(round) not in (None, file.digest):
                self._remove(file)

    async def clear(self) -> None:
        """The state was a wrong one, and so may be the files."""
        async with self._writing:
            for file in tuple(self.files):
                self._remove(file)

    def _remove(self, file: SnapshotFile) -> None:
        self.files.remove(file)
        file.give_up()

    async def _renew(self, *, insist: bool) -> None:
        """Write a file of the state as it is, if there is room for it and the state is whole; see `_capture`.

        It is written over the oldest one, where there are as many as may be.
        """
        if len(self.files) >= MAX_FILES:
            if self.files[0].in_use:
                return
            self.files.pop(0).give_up(self._spare)
        try:
            file = await self._capture(insist)
        finally:
            self._spare.unlink(missing_ok=True)
        if file is not None:
            self.files.append(file)

    async def _capture(self, insist: bool) -> SnapshotFile | None:
        """A file of the state as it is: chunk by chunk, while rounds go first.

        If one comes between, the next one's step waits for the file, which is begun as soon as it may be: at the end of
        a round. Unless nobody insists: then there is none.
        """
        file = await self._copy()
        if file is None and insist:
            log.info("a round came before a snapshot was written: the next one waits for it, if it must")
            async with self._still():
                if self._valid():
                    file = await asyncio.to_thread(SnapshotFile.write, self._path(), self._state, self._spare)
        return None if file is None else await self._checked(file)

    async def _copy(self) -> SnapshotFile | None:
        """Write the state chunk by chunk between rounds; None when it has changed meanwhile, or is not whole."""
        with SnapshotWriter(self._path(), self._state, self._spare) as writer:
            for _ in writer.meta_chunks():
                async with self.courtesy.turn():
                    async with self._still():
                        if not self._valid() or self._state.lineage_id != writer.meta.lineage_id:
                            return None
                        await asyncio.to_thread(writer.copy)
                    await asyncio.to_thread(writer.put)
            return writer.finish()

    async def _checked(self, file: SnapshotFile) -> SnapshotFile | None:
        """Nothing else is served than what this peer computed, not even after a fault of this machine's memory."""
        expected = await self.digest(file.meta.round, file.meta.lineage_id)
        if file.digest == expected:
            return file
        if expected is not None:  # else this peer is on another lineage by now
            log.error("the state of round %d is not what it was when it was new; it is not served", file.meta.round)
        file.path.unlink(missing_ok=True)
        return None

    def _path(self) -> Path:
        return self._history.folder / f"snapshot-{self._state.lineage_id[:16]}.bin"
