"""A gossip peer's own state: nobody else holds the same, and there is no chain of links that leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from peer.link.memory import Head, SharedState
from peer.outer.state.outer_state import OuterState
from peer.protocol.lineage import Position
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_file import SnapshotFile, load_snapshot

log = logging.getLogger(__name__)
RENEWED_AFTER_S = 30.0  # newcomers of the next seconds take the same file


class LocalStateStore:
    """Owns every change of the state; stands where `Keeper` stands in a run with a lineage.

    Args:
        memory: the shared memory that the state's tensors lie in.
        state: this peer's; its `lineage_id` is its own digest.
        history: without a chain; its folder holds the snapshot files.

    Attributes:
        valid: the state is whole.
        position: round and digest; the weight is the round, by which others see who lags.
        shelf: the snapshots that newcomers take.
    """

    def __init__(self, memory: SharedState, state: OuterState, history: ChainStore) -> None:
        self.memory, self.state, self.history = memory, state, history
        self.valid = False
        self.position = Position(0, history.genesis, 0)
        self._lock = asyncio.Lock()
        self.snapshot_cache = LocalSnapshotCache(history.folder, state, self.still, lambda: self.valid)
        history.chain_path.touch()

    def restore(self) -> Head | None:
        """Take up what the shared memory holds: a state with the digest that its head names, or genesis.

        Returns:
            the head of a state that was taken up; None for genesis, and when the state does not verify.
        """
        head, digest = self.memory.head, self.state.digest()
        if head is not None and digest == head.state_digest:
            self._settle(head.round, digest)
            return head
        if head is not None:
            log.warning("the state of round %d does not verify; taking another peer's", head.round)
        self.memory.head = None
        if digest == self.history.genesis:
            self._settle(0, digest)
        return None

    async def digest(self) -> str:
        """Of the state as it stands."""
        return self.position.lineage_id

    async def apply(self, change: Callable[[], None], round: int, contributed: int) -> None:
        """Change the state, which stands at `round` then; `contributed` is the snapshot that went into it."""
        async with self._lock:
            self._unsettle()
            await asyncio.to_thread(change)
            await self._write_head(round, contributed)

    async def adopt(self, path: Path, round: int) -> None:
        """Take a verified snapshot file as the state."""
        async with self._lock:
            self._unsettle()
            await asyncio.to_thread(load_snapshot, path, self.state)
            await self._write_head(round, None)
        path.unlink()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Hold the state still: nothing changes inside."""
        async with self._lock:
            yield

    def _unsettle(self) -> None:
        self.memory.head = None
        self.valid = False

    async def _write_head(self, round: int, contributed: int | None) -> None:
        digest = await asyncio.to_thread(self.state.digest)
        self.memory.head = Head(round=round, lineage_id=digest, state_digest=digest, contributed=contributed)
        self._settle(round, digest)

    def _settle(self, round: int, digest: str) -> None:
        self.state.round, self.state.lineage_id = round, digest
        self.valid = True
        self.position = Position(round, digest, round)


class LocalSnapshotCache:
    """The newest snapshot of a gossip peer's state, and the one before it while somebody may read that.

    Args:
        folder: holds the files.
        state, still, valid: as for `Shelf`.
    """

    def __init__(
        self, folder: Path, state: OuterState, still: Callable[[], contextlib.AbstractAsyncContextManager[None]],
        valid: Callable[[], bool],
    ) -> None:
        self.priority = RoundPriority()
        self._folder, self._state, self._still, self._valid = folder, state, still, valid
        self._writing = asyncio.Lock()
        self.files: list[SnapshotFile] = []
        for path in folder.glob("snapshot*"):  # of an earlier life
            path.unlink(missing_ok=True)

    async def newest(self) -> SnapshotFile | None:
        """A file of the last seconds; None while the state is not whole."""
        async with self._writing:
            if self.files and time.monotonic() - self.files[-1].written_at < RENEWED_AFTER_S:
                return self.files[-1]
            if len(self.files) > 1 and self.files[0].in_use:
                return self.files[-1]
            async with self._still():
                if not self._valid():
                    return None
                if not self.files or self.files[-1].meta.lineage_id != self._state.lineage_id:
                    path = self._folder / f"snapshot-{self._state.lineage_id[:16]}.bin"
                    self.files.append(await asyncio.to_thread(SnapshotFile.write, path, self._state))
            for file in self.files[:-2]:
                self.files.remove(file)
                file.path.unlink(missing_ok=True)
            return self.files[-1]

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:  # noqa: ARG002
        """See `Snapshots.offer`."""
        held = await self.get(wanted) if wanted is not None else None
        return held or await self.newest()

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        """See `Snapshots.get`."""
        return next((file for file in self.files if file.meta.lineage_id == lineage_id), None)

    async def digest(self, round: int, lineage_id: str) -> str | None:  # noqa: ARG002
        """See `Snapshots.digest`: in gossip a lineage id is the digest."""
        return lineage_id if lineage_id == self._state.lineage_id and self._valid() else None

    async def update(self, digest: str) -> Path | None:  # noqa: ARG002
        """See `Snapshots.update`: in gossip there are none."""
        return None
