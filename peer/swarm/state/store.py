"""The outer state of this peer, kept whole: shared memory, head and chain change together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from peer.link.memory import Head, SharedState
from peer.outer.numerics.offload import run_offloaded
from peer.outer.state.outer_state import OuterState
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol.lineage import Certificate
from peer.swarm.runtime.timing import STANDARD, Timing
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.owned_state import OwnedState
from peer.swarm.state.snapshot_cache import SnapshotCache
from peer.swarm.state.snapshot_file import load_snapshot

log = logging.getLogger(__name__)


class StateStore(OwnedState):
    """The outer state of a run with one lineage, its chain and its updates.

    Attributes:
        snapshot_cache: the snapshots that joiners take.
    """

    def __init__(
        self, memory: SharedState, state: OuterState, history: ChainStore, timing: Timing = STANDARD
    ) -> None:
        super().__init__(memory, state, history, timing)
        self._writing: asyncio.Future[None] | None = None
        self._hashing: asyncio.Future[None] | None = None
        self.snapshot_cache = SnapshotCache(self)

    def _verified(self, head: Head, digest: str, chains: Sequence[Path]) -> str | None:
        """The lineage id that the head names, if one of the files holds the chain that leads there."""
        told = head.state_digest in (digest, None)
        return head.lineage_id if told and any(self.history.load(path, head.lineage_id) for path in chains) else None

    def _weight(self) -> int:
        return self.history.weight

    async def apply(self, update: AnyUpdate, certificate: Certificate, contributed: int | None) -> None:
        """Apply a certified update; `contributed` is the snapshot of this peer that went into it.

        The update's file is written afterwards: only the next round's step waits for it.
        """
        async with self._lock:
            await self.written()
            await self.digest()  # a chain must not be ahead of its state, should this fail
            await run_offloaded(update.numel, self._step, update, certificate)
            self._write_head(contributed)
            self._writing = asyncio.ensure_future(self._keep(update))

    def _step(self, update: AnyUpdate, certificate: Certificate) -> None:
        link = certificate.link
        self.history.append(certificate)
        self._unsettle()
        self.state.apply(update, link.round + 1, link.id)

    async def _keep(self, update: AnyUpdate) -> None:
        try:
            await asyncio.to_thread(self.history.keep_update, *update.parts)
        except OSError as error:
            log.error("the update of round %d is not kept for peers that catch up: %s", self.state.round, error)

    async def adopt(self, path: Path, chain: Sequence[Certificate]) -> None:
        """Take a verified snapshot file as the state, and its verified chain."""
        async with self._lock:
            await self.written()
            await self.digest()  # which is still being read
            self._unsettle()
            await asyncio.to_thread(load_snapshot, path, self.state)
            self.state.round = len(chain)
            self.state.lineage_id = chain[-1].link.id if chain else self.history.genesis
            await asyncio.to_thread(self.history.replace, chain)
            self._write_head(None)
        path.unlink()

    async def digest(self) -> str:
        """The digest of the current state, computed once, when that was new."""
        if self._hashing is not None:
            await asyncio.shield(self._hashing)
        return self._digest

    @property
    def hashing(self) -> asyncio.Future[None] | None:
        """The computation of the newest digest, which the next round's link needs."""
        return self._hashing

    async def doubt(self) -> None:
        """The state is not that of this peer's lineage: serve it to no peer until another one is adopted."""
        async with self._lock:
            await self.digest()  # which is still being read
            self._unsettle()
        await self.snapshot_cache.clear()

    async def written(self) -> None:
        """Return when the newest update is in its file."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _write_head(self, contributed: int | None) -> None:
        head = Head(round=self.state.round, lineage_id=self.state.lineage_id, contributed=contributed)
        self.memory.head = head
        self._hashing = asyncio.ensure_future(self._hash(head))
        self._settle(self.state.round, self.state.lineage_id)

    async def _hash(self, head: Head) -> None:
        self._digest = await asyncio.to_thread(self.state.digest)
        self.memory.head = head.model_copy(update={"state_digest": self._digest})
