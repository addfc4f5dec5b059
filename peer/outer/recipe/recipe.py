"""A recipe: a choice of parts and numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from peer.errors import UserError
from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.compress.base import Codec
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.randomk import RandomK
from peer.outer.compress.registry import COMPRESSORS, codec
from peer.outer.optim.averaged import Averaged, PrimalAveraged, WithSecond
from peer.outer.optim.every_step import every_step
from peer.outer.optim.optimizers import Descent, OuterOptimizer, Sgd
from peer.outer.optim.scheduled import Scheduled, Stages
from peer.outer.policy.backup import Backup
from peer.outer.policy.local_rules import LocalRule, Plain, Proximal, PseudoSync, Replay
from peer.outer.policy.merge_rules import Accelerated, Carry, Eager, Elastic, Keep, MergeRule, Mix
from peer.outer.policy.moments import BesideMoments, Desynced, WithMoments
from peer.outer.policy.regular import Regular, Schedule
from peer.outer.policy.schedules import Every, GradientChange, Strided, Timer
from peer.outer.policy.straggler import ComputeTimeout, Quorum, StragglerPolicy, WaitAll
from peer.outer.policy.work_allocation import AdaptiveTopK, EvenSplit, TimeBalanced, WorkAllocator
from peer.outer.recipe.registry import AGGREGATORS, OUTER
from peer.outer.state.flat_layout import Cut
from peer.outer.state.fragments import Turns, whole
from peer.outer.state.gossip_mixing import a2cid2_coefficients, chi
from peer.outer.topology.topologies import AllPeers, BandwidthMatching, Groups, Neighbours, RandomPairs, Topology
from peer.protocol.manifest import InnerSpec

PARTS: Final[Mapping[str, Mapping[str, type]]] = MappingProxyType(
    {
        "schedule": {"every": Every, "strided": Strided, "gradient-change": GradientChange, "timer": Timer},
        "local": {"plain": Plain, "proximal": Proximal, "pseudo-sync": PseudoSync, "replay": Replay},
        "merge": {"mix": Mix, "carry": Carry, "elastic": Elastic, "eager": Eager, "accelerated": Accelerated},
        "topology": {
            "all": AllPeers, "pairs": RandomPairs, "groups": Groups, "neighbours": Neighbours,
            "bandwidth": BandwidthMatching,
        },
        "aggregator": AGGREGATORS,
        "outer": OUTER,
        "outer_schedule": {"stages": Stages},
        "straggler": {"wait": WaitAll, "quorum": Quorum, "backup": Backup, "compute-timeout": ComputeTimeout},
        "allocator": {"even": EvenSplit, "time-balanced": TimeBalanced, "adaptive-topk": AdaptiveTopK},
        "feedback": {"error-feedback": ErrorFeedback},
        "moments": {"desynced": Desynced},
    }
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the swarm does between and at rounds. Whether its parts agree is what `validation.checked` asks.

    Attributes:
        name: the name in the manifest.
        source: where the algorithm and its numbers come from.
        summary: its equation in one line.
        payload: `delta`: anchor minus local after many steps; `gradient`: of every step; `parameters`: gossip.
        exchange: `reduce`: each shard is averaged by one member and encoded once; `gather`: all get every payload.
        schedule: when.
        compressor: the codec's expression, see `peer.outer.compress.registry.codec`.
        feedback: what the codec loses is added to the next contribution.
        local: what is added to the inner loop.
        moments: which moments of the inner optimizers are averaged, too.
        merge: how a trainer adopts the result.
        topology: which peers average with each other.
        aggregator: contributions -> one vector.
        outer: aggregate -> anchor.
        outer_schedule: what changes in `outer` in the course of a run.
        straggler: which peers a round waits for.
        allocator: the work of each peer.
        inner: the inner optimizer it was published with; `none` when the outer one makes every step.
        average: decay per round of the average of anchors that the run yields; 0 yields the last anchor.
        interpolation: how far on the way to that average peers start their rounds; 0 at the anchor itself.
    """

    name: str
    source: str
    summary: str
    schedule: Schedule
    payload: Literal["delta", "gradient", "parameters"] = "delta"
    exchange: Literal["reduce", "gather"] = "reduce"
    compressor: str = "fp32"
    feedback: ErrorFeedback | None = None
    local: LocalRule = Plain()
    moments: Desynced | None = None
    merge: MergeRule = Mix(alpha=0.0)
    topology: Topology = AllPeers()
    aggregator: Aggregator = Mean()
    outer: OuterOptimizer = Sgd(lr=1.0)
    outer_schedule: Stages | None = None
    straggler: StragglerPolicy = WaitAll()
    allocator: WorkAllocator = EvenSplit()
    inner: Literal["adamw", "muon", "sgd", "none"] = "adamw"
    average: float = 0.0
    interpolation: float = 0.0

    def __post_init__(self) -> None:
        codec(self.compressor)
        _ = self.optimizer

    @property
    def optimizer(self) -> OuterOptimizer:
        """The outer optimizer with the average of anchors around it, or the second iterate, where there is one."""
        if self.merge.second_iterate:
            return WithSecond(self.outer)
        outer = self.outer
        if self.outer_schedule is not None and isinstance(outer, Descent):
            outer = Scheduled(base=outer, stages=self.outer_schedule)
        if self.interpolation:
            outer = PrimalAveraged(base=outer, decay=self.average, interpolation=self.interpolation)
        elif self.average:
            outer = Averaged(base=outer, decay=self.average)
        return outer if self.moments is None else BesideMoments(base=outer, moments=self.moments)

    def inner_settings(self, inner: InnerSpec) -> InnerSpec:
        """What a trainer takes of a manifest's inner settings: the recipe's own optimizer where the manifest names
        none, and no clipping of gradients whose mean is clipped.
        """
        own = {} if inner.optimizer is not None else {"optimizer": "sgd" if self.inner == "none" else self.inner}
        return inner.model_copy(update=own | ({"max_grad_norm": math.inf} if self.clips_mean else {}))

    @property
    def clips_mean(self) -> bool:
        """Whether the mean gradient is clipped, that of one large batch; else each peer clips its own."""
        return self.payload == "gradient" and not self.accumulates and self.feedback is None

    def with_inner(self, inner: InnerSpec) -> Recipe:
        """The same recipe in a run with these inner settings, whose optimizer all share if they step together."""
        if self.payload != "gradient" or self.accumulates:
            return self
        outer = every_step(self.inner_settings(inner), inner.max_grad_norm if self.clips_mean else None)
        return replace(self, outer=outer)

    def lasting(self, rounds: int | None) -> Recipe:
        """The same recipe in a run of so many rounds, if it does not know of how many; None: not known.

        Raises:
            UserError: the outer schedule follows shares of a run whose rounds are not known.
        """
        if self.outer_schedule is None or self.outer_schedule.rounds is not None:
            return self
        if rounds is None and self.outer_schedule.needs_end:
            raise UserError(
                f"recipe {self.name!r}: outer_schedule says shares of a run without a known number of rounds",
                "set rounds.total, or outer_schedule: none, or of its numbers restart alone",
            )
        own = None if rounds is None else max(1, rounds // self.num_fragments)
        if own is not None and self.moments is not None:
            own = max(1, self.moments.rounds(own))
        return replace(self, outer_schedule=replace(self.outer_schedule, rounds=own))

    def codec(self) -> Codec:
        """The codec of contributions, not yet bound to a model's shapes."""
        return codec(self.compressor)

    @property
    def dense(self) -> bool:
        """Whether the codec keeps every element, so that payloads can be cut, reduced and encoded again."""
        return self.compressor in COMPRESSORS

    @property
    def steps_per_round(self) -> int:
        """H: inner steps in which everything is synchronised once."""
        return self.schedule.steps_per_round

    @property
    def overlap_steps(self) -> int:
        """Steps between sending and applying."""
        return self.schedule.overlap_steps

    @property
    def num_fragments(self) -> int:
        """How many fragments are synchronised by themselves."""
        return self.schedule.num_fragments

    @property
    def cut(self) -> Cut:
        """How the model is cut into them."""
        return self.schedule.cut

    def fitted(self, num_blocks: int) -> Recipe:
        """The same recipe for a model of so many blocks."""
        return replace(self, schedule=self.schedule.fitted(num_blocks))

    @property
    def late_merge(self) -> MergeRule:
        """How a trainer that never waits takes up a round: in place of the anchor alone, with the steps made since."""
        if self.shares_mean:
            return Keep(kept_rounds=2 * self.straggler.period)  # of two windows, a peer misses fewer
        return Carry() if self.merge == Mix(alpha=0.0) or self.merge.second_iterate else self.merge

    @property
    def votes(self) -> GradientChange | None:
        """What calls for rounds, where peers do; else rounds begin by themselves."""
        return self.schedule if isinstance(self.schedule, GradientChange) else None

    def acceleration(self, num_peers: int) -> tuple[float, float]:
        """(eta, alpha_tilde) of A2CiD2 among so many peers, pairs of which meet at every round; zeros without it.

        Under a mask each element meets its partner's that much more rarely: chi1 and chi2 are that much larger.
        """
        merge, topology = self.merge, self.topology
        if not (isinstance(merge, Accelerated) and isinstance(topology, Neighbours)) or num_peers < 2:
            return 0.0, 0.0
        drawn = self.codec()
        often = drawn.ratio if isinstance(drawn, RandomK) else 1.0
        chi1, chi2 = chi(topology.edges(range(num_peers)))
        eta, alpha_tilde = a2cid2_coefficients(chi1 / often, chi2 / often)
        return eta if merge.eta is None else merge.eta, alpha_tilde if merge.alpha_tilde is None else merge.alpha_tilde

    @property
    def accumulates(self) -> bool:
        """Whether gradients are scaled by the rate before they are compressed and accumulated (DeMo)."""
        return self.inner == "none"

    @property
    def gradients_per_step(self) -> int:
        """Forward and backward passes of one inner step: FedGLOMO makes two on each of two trajectories."""
        return 4 if self.local.replays else 1

    @property
    def shared_anchor(self) -> bool:
        """Whether all peers hold the same anchor; in gossip each has its own."""
        return self.payload != "parameters" and isinstance(self.topology, AllPeers)

    @property
    def shares_mean(self) -> bool:
        """Whether the anchor is the mean of the parameters of a round's members; the other peers keep theirs."""
        return self.payload == "parameters" and not self.gossips

    @property
    def alike(self) -> bool:
        """Whether all contributions to a shared anchor weigh alike: gradients, too, in which what a time limit dropped
        counts as zeros.
        """
        fixed = self.straggler.timeout is not None and self.straggler.timeout.fixed
        return self.shares_mean or (self.payload == "gradient" and fixed)

    @property
    def gossips(self) -> bool:
        """Whether a round is of the peers that a topology draws, each with a state of its own."""
        return not isinstance(self.topology, AllPeers)

    def regular_steps(self, rounds: int | None) -> int:
        """Inner steps of a regular contribution in the first `rounds` rounds of a swarm: the largest weight of a peer.

        Where peers call for rounds it is what the gradient norm is smoothed over.
        """
        if self.votes is not None:
            return self.votes.smoothing
        return self.allocator.most_steps(self.rounds.longest(rounds))

    @property
    def fewest_steps(self) -> int:
        """Inner steps from one round of a swarm to the next, at least."""
        return 1 if self.votes is not None or self.allocator.uneven else self.rounds.shortest

    @property
    def rounds(self) -> Regular:
        """The schedule of a recipe whose rounds begin by themselves, on a swarm."""
        assert isinstance(self.schedule, Regular), f"{self.name} has no rounds that begin by themselves"
        return self.schedule if self.moments is None else WithMoments(base=self.schedule, moments=self.moments)

    def rounds_within(self, steps: int) -> int | None:
        """How many rounds that makes of each peer's so many steps; None where peers call for rounds."""
        return self.rounds.within(steps) if isinstance(self.schedule, Regular) else None

    @property
    def turns(self) -> Turns:
        """What each round of a swarm is of."""
        return self.rounds.turn if isinstance(self.schedule, Regular) else whole

    def fragment_of(self, round: int) -> int:
        """The fragment that the round is of which follows `round` rounds."""
        return self.turns(round).fragment

    def with_fragments(self, count: int) -> Recipe:
        """The same recipe with so many fragments."""
        assert isinstance(self.schedule, Strided), f"{self.name} has one fragment"
        return replace(self, schedule=replace(self.schedule, num_fragments=count))

    def with_steps_per_round(self, steps: int) -> Recipe:
        """The same recipe with another H."""
        return replace(self, schedule=paced(self.schedule, steps, self.name))


def paced(schedule: Schedule, steps: int, name: str) -> Schedule:
    """The schedule of the recipe called `name` with another H.

    Raises:
        UserError: a schedule without an H.
    """
    if isinstance(schedule, Strided):
        return replace(
            schedule, period=steps, num_fragments=min(schedule.num_fragments, steps),
            overlap_steps=min(schedule.overlap_steps, steps),
        )
    if isinstance(schedule, Timer):
        return replace(schedule, rate=1.0 / steps, overlap_steps=min(schedule.overlap_steps, steps))
    if isinstance(schedule, Every):
        overlap = steps if schedule.overlap_steps == schedule.steps else min(schedule.overlap_steps, steps)
        limit = None if schedule.max_steps is None else max(schedule.max_steps, steps)
        return replace(schedule, steps=steps, overlap_steps=overlap, max_steps=limit)
    raise UserError(
        f"recipe.steps_per_round={steps}: recipe {name!r} decides at every step",
        "leave steps_per_round out, or choose a recipe with rounds, such as 'diloco'",
    )


def word_of(kind: str, part: object) -> str:
    """What a manifest calls this part; `none` for no part."""
    return next((name for name, type_ in PARTS[kind].items() if type(part) is type_), "none")


def describe(recipe: Recipe) -> dict[str, Any]:
    """Every part of a recipe as JSON types: its word and its numbers."""
    parts: dict[str, Any] = {
        key: getattr(recipe, key)
        for key in (
            "name", "source", "summary", "payload", "exchange", "compressor", "inner", "average", "interpolation",
        )
    }
    for kind in PARTS:
        part = getattr(recipe, kind)
        numbers = {} if part is None else {
            f.name: _plain(getattr(part, f.name))
            for f in dataclasses.fields(part)
            if not f.metadata.get("bound", False)
        }
        parts[kind] = None if part is None else {"name": word_of(kind, part), **numbers}
    return parts


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        numbers = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"name": type(value).__name__, **numbers}
    if isinstance(value, float) and value == float("inf"):
        return None
    return list(value) if isinstance(value, tuple) else value
