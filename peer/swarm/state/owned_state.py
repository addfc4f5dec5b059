"""What the two stores of an outer state share: shared memory, head and position change together, under one lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from peer.link.memory import Head, SharedState
from peer.outer.state.outer_state import OuterState
from peer.protocol.lineage import Position
from peer.swarm.runtime.timing import Timing
from peer.swarm.state.chain import ChainStore

log = logging.getLogger(__name__)


class OwnedState(ABC):
    """Owns every change of an outer state.

    Args:
        memory: the shared memory that the state's tensors lie in.
        history: its chain and updates; its folder holds the snapshot files.

    Attributes:
        valid: the state is whole. False before the first valid state, and for the moment of a change.
        position: of this peer; during a change, still the previous one.
    """

    def __init__(self, memory: SharedState, state: OuterState, history: ChainStore, timing: Timing) -> None:
        self.memory, self.state, self.history, self.timing = memory, state, history, timing
        self.valid = False
        self.position = Position(0, history.genesis, 0)
        self._lock = asyncio.Lock()
        self._digest = ""

    def restore(self, chains: Sequence[Path] = ()) -> Head | None:
        """Restore the state in the shared memory: one whose head verifies, or genesis.

        Args:
            chains: files, one of which may hold the chain that leads to the state.

        Returns:
            the head of a state that was taken up; None for genesis, and when the state does not verify (`valid`
            tells).
        """
        head, digest = self.memory.head, self.state.digest()
        self._digest = digest
        if head is not None and (lineage_id := self._verified(head, digest, chains)) is not None:
            self.memory.head = head.model_copy(update={"state_digest": digest})
            self._settle(head.round, lineage_id)
            return head
        if head is not None:
            log.warning("the state of round %d does not verify; taking another from the swarm", head.round)
        self.history.replace([])
        self.memory.head = None
        if digest == self.history.genesis:
            self._settle(0, digest)
        return None

    @abstractmethod
    def _verified(self, head: Head, digest: str, chains: Sequence[Path]) -> str | None:
        """The lineage id of the state, which has this digest; None where the state is not what its head says."""

    @abstractmethod
    def _weight(self) -> int:
        """The weight of the state in fork choice, once it is settled."""

    @abstractmethod
    async def digest(self) -> str:
        """The digest of the current state."""

    @abstractmethod
    async def written(self) -> None:
        """Return when all that is kept of the state is in its files."""

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Hold the outer state still: nothing changes inside."""
        async with self._lock:
            yield

    def _unsettle(self) -> None:
        self.memory.head = None
        self.valid = False

    def _settle(self, round: int, lineage_id: str) -> None:
        self.state.round, self.state.lineage_id = round, lineage_id
        self.valid = True
        self.position = Position(round, lineage_id, self._weight())
