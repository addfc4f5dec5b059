"""A gossip peer's own state: no other peer holds the same, and there is no chain of links that leads to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.link.memory import Head, SharedState
from peer.outer.state.outer_state import OuterState
from peer.swarm.runtime.timing import STANDARD, Timing
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.owned_state import OwnedState
from peer.swarm.state.snapshot_cache import SnapshotFiles
from peer.swarm.state.snapshot_file import SnapshotFile, load_snapshot
from peer.system.clock import boot_clock


class LocalStateStore(OwnedState):
    """This peer's state, whose `lineage_id` is its own digest, and whose weight is its round.

    Args:
        history: without a chain; its folder holds the snapshot files.

    Attributes:
        snapshot_cache: the snapshots that newcomers take.
    """

    def __init__(
        self, memory: SharedState, state: OuterState, history: ChainStore, timing: Timing = STANDARD
    ) -> None:
        super().__init__(memory, state, history, timing)
        self.snapshot_cache = LocalSnapshotCache(self)
        history.chain_path.touch()

    def _verified(self, head: Head, digest: str, chains: Sequence[Path]) -> str | None:  # noqa: ARG002
        """The digest, if the head names it: no chain leads to the state."""
        return digest if head.state_digest == digest else None

    def _weight(self) -> int:
        return self.state.round

    async def digest(self) -> str:
        """The digest of the current state."""
        return self.position.lineage_id

    async def written(self) -> None:
        """No update is kept."""

    async def apply(self, change: Callable[[], None], round: int, contributed: int) -> None:
        """Change the state, which is of `round` then; `contributed` is the snapshot that went into it."""
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

    async def _write_head(self, round: int, contributed: int | None) -> None:
        digest = await asyncio.to_thread(self.state.digest)
        self.memory.head = Head(round=round, lineage_id=digest, state_digest=digest, contributed=contributed)
        self._settle(round, digest)


class LocalSnapshotCache(SnapshotFiles):
    """The newest snapshot of a gossip peer's state, and the one before it while that may be read."""

    async def newest(self) -> SnapshotFile | None:
        """A file of the last seconds; None while the state is not whole."""
        async with self._writing:
            if self.files and boot_clock() - self.files[-1].written_at < self._owned.timing.renewed_after_s:
                return self.files[-1]
            if len(self.files) > 1 and self.files[0].in_use(self._owned.timing):
                return self.files[-1]
            async with self._owned.still():
                if not self._owned.valid:
                    return None
                if not self.files or self.files[-1].meta.lineage_id != self._state.lineage_id:
                    path = self._owned.history.folder / f"snapshot-{self._state.lineage_id[:16]}.bin"
                    self.files.append(await asyncio.to_thread(SnapshotFile.write, path, self._state))
            for file in self.files[:-2]:
                self.files.remove(file)
                file.path.unlink(missing_ok=True)
            return self.files[-1]

    async def offer(self, wanted: str | None, from_round: int) -> SnapshotFile | None:  # noqa: ARG002
        held = await self.get(wanted) if wanted is not None else None
        return held or await self.newest()

    async def get(self, lineage_id: str) -> SnapshotFile | None:
        return self._held(lineage_id)

    async def digest(self, round: int, lineage_id: str) -> str | None:  # noqa: ARG002
        """See `Snapshots.digest`: in gossip a lineage id is the digest."""
        return lineage_id if lineage_id == self._state.lineage_id and self._owned.valid else None

    async def update(self, digest: str) -> Path | None:  # noqa: ARG002
        """See `Snapshots.update`: in gossip there are none."""
        return None
