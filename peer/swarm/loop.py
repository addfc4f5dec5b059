"""What the two round loops share: the position of this peer, whether it takes part, and the frame of one round."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from peer.link.channel import TrainerLink
from peer.link.contribution_slot import ContributionSlot
from peer.link.memory import Head
from peer.link.messages import RoundEnded
from peer.outer.recipe.plan import RunPlan
from peer.outer.record import RoundRecord
from peer.outer.round import Due
from peer.protocol.identity_work import NO_WORK, IdentityWork
from peer.protocol.lineage import Position
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.state.owned_state import OwnedState
from peer.swarm.state.run_control import RunControl

Store = TypeVar("Store", bound=OwnedState)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The run of one peer.

    Attributes:
        organiser: peer id that serves the genesis state.
        opened_at: wall-clock seconds since when the organiser has published the manifest.
        introducers: peer ids in the addresses that a person gave.
        work: what the run asks of identities, and this peer's own.
        rng: jitter, and which peer a newcomer asks.
        control: what the organiser has decided; None: what lies in the folder of the run's history.
    """

    node: Node
    directory: Directory
    plan: RunPlan
    organiser: str
    opened_at: float = 0.0
    introducers: tuple[str, ...] = ()
    work: IdentityWork = NO_WORK
    trainer: TrainerLink
    rng: random.Random
    control: RunControl | None = None


class RoundLoop(ABC, Generic[Store]):
    """The rounds of one peer.

    Args:
        called: rounds begin when a peer calls for one, and at no other time.
    """

    def __init__(self, context: RunContext, store: Store, called: bool = False) -> None:
        self._node, self._directory, self._manifest = context.node, context.directory, context.plan.manifest
        self._context, self._trainer, self.store = context, context.trainer, store
        self.slot = ContributionSlot(store, context.trainer, called)
        self.joined = False
        self.leaving = False
        self.group_size = 0
        self._counted = (0, 0)
        self.control = context.control or RunControl.of(store.history.folder, self._manifest, context.organiser)
        self._leave_at = 0.0

    def position(self) -> Position:
        return self.store.position

    @property
    def finished(self) -> bool:
        total = self.control.rounds_total
        if total is not None and self.store.state.round >= total:
            return True
        return self.control.state == "finished" and self._node.clock() >= self._leave_at

    @property
    def halted(self) -> bool:
        """Whether this peer makes no rounds now: it rests, or the organiser has paused the run."""
        return self._node.resting or self.control.paused

    @property
    def state(self) -> Literal["joining", "training", "paused"]:
        """What its record says while it has not ended."""
        if not self.joined or self._node.resting:
            return "joining"
        return "paused" if self.control.paused else "training"

    def steer(self) -> None:
        """The organiser has decided something: obey at the end of the round that is under way."""
        self._leave_at = self._node.clock() + self._last_round_s()
        self.slot.work.set()
        self._directory.announce_soon()

    def _last_round_s(self) -> float:
        """How long the last rounds of a run that is being ended may take."""
        return 0.0

    @property
    def lines(self) -> str:
        """What this peer has measured of its lines to others, as a record says it."""
        return ""

    def taking_part(self) -> bool:
        """Whether this peer makes rounds now."""
        return self.joined and not self.finished and not self.leaving and not self.halted

    @abstractmethod
    def on_return(self, peer_id: str) -> None:
        """A peer asks for what it has missed."""

    @abstractmethod
    async def start(self) -> None:
        """Serve the others."""

    @abstractmethod
    async def join(self, resumed: Head | None) -> None:
        """Get a valid state, and hand it to the trainer."""

    @abstractmethod
    async def run(self) -> None:
        """Rounds until the run ends or the peer leaves."""

    @abstractmethod
    async def _perform(self, due: Due) -> RoundRecord:
        """Make a round with this contribution."""

    @abstractmethod
    async def _after(self, record: RoundRecord) -> None:
        """Draw the consequences of a round, of which the trainer has been told."""

    async def _rest(self) -> None:
        """Return when this peer exchanges again."""
        self._directory.announce_soon()
        while self.halted and not self.leaving and not self.finished:
            await asyncio.sleep(self._node.timing.recheck_s)
        self._directory.announce_soon()

    def _enter(self, contributed: int | None, *, earlier: bool = False) -> None:
        """The state is valid: hand it to the trainer; `contributed` is the snapshot of this peer that went into it."""
        self.joined = True
        self.slot.announce_anchor(contributed, earlier=earlier)
        self._directory.announce_soon()

    async def _one_round(self, due: Due) -> None:
        self.slot.begin_round()
        try:
            record = await self._perform(due)
        finally:
            self.slot.release(due)
        self._trainer.tell(RoundEnded(record=record.model_copy(update=self._traffic())))
        if record.status == "committed":
            self.group_size = len(record.members)
        await self._after(record)

    def _traffic(self) -> dict[str, int]:
        """Bytes since the last record: the others send theirs for a round before this peer begins it."""
        (sent, received), now = self._counted, self._node.traffic["round"]
        self._counted = (now.sent, now.received)
        return {"bytes_sent": now.sent - sent, "bytes_received": now.received - received}


async def read_directory(node: Node, directory: Directory, patience: float) -> None:
    """Read it; while it is empty, again until the node's clock shows `patience`.

    Records may lag behind a bootstrap that has just come back.
    """
    await directory.refresh()
    while not directory.peers and node.clock() < patience:
        await asyncio.sleep(node.timing.recheck_s)
        await directory.refresh()
