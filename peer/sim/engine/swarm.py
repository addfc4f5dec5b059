"""The peers of a simulation in virtual time: the position of each, what it waits for, and the counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from peer.outer.policy.regular import Event
from peer.outer.recipe.recipe import Recipe
from peer.sim.engine.clock import Clock
from peer.sim.engine.work_split import divide
from peer.sim.learner.replica import SimReplica
from peer.sim.round.aggregation import Synchroniser
from peer.sim.round.contribution import Contribution
from peer.sim.round.rounds import SimRound
from peer.sim.world.overlap import Layer


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a simulation lasts and how fast time goes.

    Attributes:
        goal_steps: inner steps of all peers together.
        step_s: seconds of one inner step of a peer of speed 1.
        tokens_per_step: of one peer.
        learning_rate: (steps of the swarm so far / peers, steps since the peer joined) -> rate.
        layers: of each fragment, sent one by one during the steps before and after; none: all at once.
    """

    goal_steps: int
    step_s: float
    tokens_per_step: int
    learning_rate: Callable[[float, int], float]
    layers: Sequence[Sequence[Layer]] = ()


@dataclass
class Tally:
    """Counts of one simulation."""

    steps: int = 0
    committed: int = 0
    aborted: int = 0
    late: int = 0
    dropped: dict[int, int] = field(default_factory=dict)
    contributions: int = 0
    joins: int = 0
    leaves: int = 0
    heals: int = 0
    events: int = 0

    def count_dropped(self, members: Sequence[int]) -> None:
        """A contribution of each of them was refused."""
        for member in members:
            self.dropped[member] = self.dropped.get(member, 0) + 1


@dataclass(eq=False)
class PeerWait:
    """What a present peer waits for.

    Attributes:
        pending: merges, in order of the steps after which they are due.
        blocked: the round whose result it waits for.
        stepped_s: when its last step was over.
        busy_until_s: when the step that it makes will be over.
        link_free_s: when its link has carried what it exchanges.
        due: contributions that it makes once the merges before them are done.
    """

    pending: list[tuple[int, SimRound, Contribution]] = field(default_factory=list)
    blocked: SimRound | None = None
    stepped_s: float = -math.inf
    busy_until_s: float = -math.inf
    link_free_s: float = -math.inf
    due: list[Event] = field(default_factory=list)


class SimSwarm:
    """What the parts of the engine share."""

    def __init__(self, recipe: Recipe, replicas: Sequence[SimReplica], sync: Synchroniser, pace: Pace) -> None:
        self.recipe, self.replicas, self.sync, self.pace = recipe, list(replicas), sync, pace
        self.clock, self.tally = Clock(), Tally()
        self.stays = [PeerWait() for _ in self.replicas]
        self.profiles = [replica.profile for replica in self.replicas]
        self.division = divide(recipe, self.profiles, pace.step_s, sync.wire_bytes(0))

    @property
    def draining(self) -> bool:
        """Whether the goal is reached: no peer begins another step, and exchanges under way finish."""
        return self.tally.steps >= self.pace.goal_steps

    def present(self, side: int) -> list[int]:
        """The peers of one side that are there, ascending."""
        return [replica.index for replica in self.replicas if replica.present and replica.side == side]

    def others(self, replica: SimReplica) -> list[SimReplica]:
        """The other peers that are present and reachable."""
        return [r for r in self.replicas if r.present and r.side == replica.side and r is not replica]

    def learning_rate(self, replica: SimReplica, *, just_made: bool = False) -> float:
        """The inner rate at the swarm's progress in steps of one peer; of the step `just_made`, or of the next."""
        steps = self.tally.steps - just_made
        return self.pace.learning_rate(max(0, steps) // len(self.replicas), replica.steps_since_join)

    def step_s(self, speed: float) -> float:
        """Seconds of a step of a peer of this speed, without jitter."""
        return self.pace.step_s * self.recipe.gradients_per_step / speed

    def rounds_made(self, replicas: Sequence[SimReplica]) -> int:
        """Rounds of the furthest peer; in steps where all make equally many steps per round."""
        per_round = self.division.steps or [1] * len(self.replicas)
        # A peer that has yet to contribute at its step has not passed it.
        return max(((r.position - bool(self.stays[r.index].due)) // per_round[r.index] for r in replicas), default=0)

    def stand_at(self, replica: SimReplica, rounds_made: int) -> None:
        """Set its position to that of a peer with so many rounds, as `rounds_made` counts them."""
        replica.position = rounds_made * (self.division.steps[replica.index] if self.division.steps is not None else 1)

    def count_time(self, replica: SimReplica) -> None:
        """It is gone, or all is over: what it has not computed of its last step was never computed."""
        replica.present_s += self.clock.now - replica.arrived_s
        replica.busy_s -= max(0.0, self.stays[replica.index].busy_until_s - self.clock.now)

    def count_sent(self, traffic: Mapping[int, float]) -> None:
        """Bytes that each member of an exchange has sent."""
        for member, num_bytes in traffic.items():
            self.replicas[member].bytes_sent += num_bytes


def clones(recipe: Recipe) -> bool:
    """Whether peers hold a state that no later anchor mends, so that a newcomer needs all of another's."""
    return recipe.payload == "gradient"


def heaviest_side(replicas: Sequence[SimReplica]) -> int:
    """The side of a partition whose peers made the most steps; of equal ones the first."""
    steps: dict[int, int] = {}
    for replica in replicas:
        steps[replica.side] = steps.get(replica.side, 0) + replica.steps
    return max(sorted(steps), key=lambda side: steps[side])
