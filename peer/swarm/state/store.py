"""The outer state of this peer, kept whole: shared memory, head and chain change together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from peer.link.memory import Head, SharedState
from peer.outer.numerics.offload import run_offloaded
from peer.outer.state.outer_state import AnyUpdate, OuterState
from peer.protocol.lineage import Certificate, Position
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_cache import SnapshotCache
from peer.swarm.state.snapshot_file import load_snapshot

log = logging.getLogger(__name__)


class StateStore:
    """Owns every change of the outer state.

    Args:
        memory: the shared memory that the state's tensors lie in.
        state: the outer state.
        history: its chain and updates.

    Attributes:
        valid: the state is whole. False before the first valid state, and for the moment of a change.
        position: where this peer stands; during a change, still where it stood.
        shelf: the snapshots that joiners take.
    """

    def __init__(self, memory: SharedState, state: OuterState, history: ChainStore) -> None:
        self.memory, self.state, self.history = memory, state, history
        self.valid = False
        self.position = Position(0, history.genesis, 0)
        self._lock = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        self._digest = ""
        self._hashing: asyncio.Future[None] | None = None
        self.snapshot_cache = SnapshotCache(history, state, self.still, lambda: self.valid, self.digest, self.written)

    def restore(self, chains: list[Path]) -> Head | None:
        """Take up what the shared memory holds: a state with a head, whose chain is in one of the files, or genesis.

        Returns:
            the head of a state that was taken up; None for genesis, and when the state does not verify (`valid`
            tells).
        """
        head, digest = self.memory.head, self.state.digest()
        self._digest = digest
        if (
            head is not None
            and head.state_digest in (digest, None)
            and any(self.history.load(path, head.lineage_id) for path in chains)
        ):
            self.state.round, self.state.lineage_id = head.round, head.lineage_id
            self.memory.head = head.model_copy(update={"state_digest": digest})
            self._settle()
            return head
        if head is not None:
            log.warning("the state of round %d does not verify; taking another from the swarm", head.round)
        self.history.replace([])
        self.memory.head = None
        if digest == self.history.genesis:
            self._settle()
        return None

    async def apply(self, update: AnyUpdate, certificate: Certificate, contributed: int | None) -> None:
        """Apply a certified update; `contributed` is the snapshot of this peer that went into it.

        The update's file is written afterwards: nobody waits for it but the next round's step.
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
            log.error("the update of round %d is not kept for those who catch up: %s", self.state.round, error)

    async def adopt(self, path: Path, chain: list[Certificate]) -> None:
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
        """Of the state as it stands, computed once, when that was new."""
        if self._hashing is not None:
            await asyncio.shield(self._hashing)
        return self._digest

    @property
    def hashing(self) -> asyncio.Future[None] | None:
        """The computation of the newest digest, which the next round's link needs."""
        return self._hashing

    async def doubt(self) -> None:
        """The state is not that of this peer's lineage: it is kept from everybody until another one is adopted."""
        async with self._lock:
            await self.digest()  # which is still being read
            self._unsettle()
        await self.snapshot_cache.clear()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Hold the outer state still: nothing changes inside."""
        async with self._lock:
            yield

    async def written(self) -> None:
        """Return when the newest update is in its file."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _unsettle(self) -> None:
        self.memory.head = None
        self.valid = False

    def _write_head(self, contributed: int | None) -> None:
        head = Head(round=self.state.round, lineage_id=self.state.lineage_id, contributed=contributed)
        self.memory.head = head
        self._hashing = asyncio.ensure_future(self._hash(head))
        self._settle()

    async def _hash(self, head: Head) -> None:
        self._digest = await asyncio.to_thread(self.state.digest)
        self.memory.head = head.model_copy(update={"state_digest": self._digest})

    def _settle(self) -> None:
        self.valid = True
        self.position = Position(self.state.round, self.state.lineage_id, self.history.weight)
