"""Manifest + recipe + scenario -> a simulated run and its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from peer.outer.allocate import AdaptiveTopK
from peer.outer.compress.feedback import Encoder
from peer.outer.compress.registry import codec
from peer.outer.fragments import FlatLayout, strided_fragments
from peer.outer.local import Replay, Spider
from peer.outer.merging import Accelerated, Eager
from peer.outer.recipes import Recipe
from peer.outer.schedules import GradientChange, Strided
from peer.outer.straggler import waits_for_all
from peer.protocol.manifest import InnerSpec
from peer.sim.engine import Engine, Hooks, Pace, Tally, _links, heaviest_side
from peer.sim.inner import inner_optimizer
from peer.sim.network import ring_allreduce_bytes
from peer.sim.overlap import layers_of
from peer.sim.replica import Learner, OuterCopy, Replica, Shadow
from peer.sim.scenario import Partition, PeerProfile
from peer.sim.sync import Ranges, Synchroniser
from peer.sim.task import Task
from peer.train.schedule import learning_rate

T = TypeVar("T")
Progress = Callable[[int, int, float | None, float], None]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One simulation.

    Attributes:
        recipe: what the swarm does.
        inner: optimizer and learning rates.
        profiles: one per peer.
        tokens: that all peers together learn from.
        seed: of topology, masks, jitter.
        step_s: seconds of an inner step at speed 1.
        evaluations: points of the loss curve before the end.
        partitions: of the scenario.
        layerwise: layers travel one by one while steps go on, see `peer.sim.overlap`; else all after the step.
    """

    recipe: Recipe
    inner: InnerSpec
    profiles: tuple[PeerProfile, ...]
    tokens: int
    seed: int = 0
    step_s: float = 1.0
    evaluations: int = 10
    partitions: tuple[Partition, ...] = ()
    layerwise: bool = True


@dataclass(frozen=True, kw_only=True)
class Point:
    """The anchor during a run; `val_loss` is of a part of the validation data until the end."""

    tokens: int
    bytes_sent_per_peer: float
    virtual_seconds: float
    val_loss: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one simulation; losses are None when only time was simulated."""

    recipe: str
    seed: int
    peers: int
    tokens: int
    val_loss: float | None
    bytes_sent_per_peer: float
    reduction_vs_ddp: float | None
    virtual_seconds: float
    utilization: float
    wall_seconds: float
    curve: tuple[Point, ...]
    tally: Tally

    def row(self) -> dict[str, Any]:
        """As JSON types."""
        document = asdict(self)
        document["tally"]["dropped"] = {str(k): v for k, v in self.tally.dropped.items()}
        return document


class Simulation(Hooks):
    """One run: builds the replicas, watches the clock, evaluates the anchor.

    Args:
        setup: what to run.
        task: what the peers learn; None simulates time and traffic alone.
        layout: of the parameters, where there is no task.
        tokens_per_step: of one peer, where there is no task.
        progress: (steps made, steps in all, last validation loss, virtual seconds).
    """

    def __init__(
        self,
        setup: Setup,
        task: Task | None,
        layout: FlatLayout | None = None,
        tokens_per_step: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.setup, self.task = setup, task
        self.layout = task.layout if task is not None else _given(layout)
        self._tokens_per_step = task.tokens_per_step if task is not None else _given(tokens_per_step)
        self._progress = progress
        recipe, count = setup.recipe, len(setup.profiles)
        self._goal = count * max(1, math.ceil(setup.tokens / (self._tokens_per_step * count)))
        self.fragments = fragments_of(recipe, self.layout)
        self._inner = recipe.inner_settings(setup.inner)
        nominal = self._tokens_per_step * max(1, recipe.steps_per_round) * 2
        self.sync = Synchroniser(recipe, self.layout, self.fragments, setup.seed, nominal, count)
        self._build_optimizer = inner_optimizer(str(self._inner.optimizer), self.layout, self._inner)
        self._shared: OuterCopy | None = None
        self._fork = torch.empty(0)
        self._scratch: Tensor | None = None
        self.replicas = [self._replica(index, profile) for index, profile in enumerate(setup.profiles)]
        self._points: list[Point] = []
        self._marks = [self._goal * k // setup.evaluations for k in range(1, setup.evaluations)]

    def run(self) -> Result:
        """Simulate.

        Raises:
            UserError: the swarm died before it reached its goal.
        """
        began = time.perf_counter()
        setup, steps = self.setup, self._goal // len(self.replicas)
        pace = Pace(
            goal_steps=self._goal,
            step_s=setup.step_s,
            tokens_per_step=self._tokens_per_step,
            learning_rate=lambda step, since_join: learning_rate(self._inner, step, steps, since_join),
            layers=layers_of(self.layout, self.fragments) if setup.layerwise else (),
        )
        engine = Engine(setup.recipe, self.replicas, self.sync, pace, self, setup.partitions, setup.seed)
        if self.task is not None:
            self._measure(engine, self.task)
        engine.run()
        loss = None
        if self.task is not None:
            loss = self._measure(engine, self.task, final=True)
        return self._result(engine, loss, time.perf_counter() - began)

    def consensus(self) -> Tensor:
        """The parameters that the swarm stands for, fp32 [P].

        The anchor, or the recipe's average of anchors; in gossip the mean of the peers' own; with gradients any peer's.
        """
        recipe, side = self.setup.recipe, heaviest_side(self.replicas)
        replicas = sorted((r for r in self.replicas if r.learner is not None), key=lambda r: (r.side != side, r.index))
        replicas = [r for r in replicas if r.present] or replicas
        learners = [learner for r in replicas if (learner := r.learner) is not None]
        # Between two rounds that are voted for, the peers' own parameters are all there is.
        own = recipe.payload != "delta" or isinstance(recipe.schedule, GradientChange)
        vectors = [learner.parameters if own else learner.outer.anchor for learner in learners]
        if recipe.shared_anchor and recipe.payload == "delta" and not isinstance(recipe.schedule, GradientChange):
            outer = learners[0].outer
            return recipe.optimizer.result(outer.anchor, outer.buffers, outer.rounds)
        if recipe.payload == "gradient":
            return vectors[0]
        mean = torch.zeros_like(vectors[0])
        for vector in vectors:
            mean.add_(vector, alpha=1.0 / len(vectors))
        return mean

    # hooks --------------------------------------------------------------------------------------------------------

    def on_step(self, engine: Engine) -> None:
        """See `Hooks.on_step`."""
        steps = engine.tally.steps
        if self.task is not None and self._marks and steps >= self._marks[0] and steps < self._goal:
            self._marks.pop(0)
            self._measure(engine, self.task)
        if self._progress is not None:
            last = self._points[-1].val_loss if self._points else None
            self._progress(steps, self._goal, last, engine.now)

    def on_join(self, replica: Replica, donor: Replica | None) -> None:
        """A newcomer takes the anchor and starts with fresh moments; with gradients, everything of another peer."""
        learner = replica.learner
        if learner is None:
            return
        learner.optimizer = self._build_optimizer(learner.parameters)
        learner.encoders = self._encoders(replica.index)
        if self.setup.recipe.payload != "gradient":
            replica.steps_since_join = 0
        if donor is not None and donor.learner is not None:
            self._copy_state(learner, donor.learner)
        elif self.setup.recipe.payload == "delta":
            learner.take_anchor()

    def on_split(self, engine: Engine) -> None:
        """Each side goes on with an outer state of its own."""
        if self._shared is None:
            return
        copies = {0: self._shared}
        for replica in engine.replicas:
            if replica.learner is not None:
                engine.sync.carry_over(replica)  # so that all progress counts from the fork
                copies.setdefault(replica.side, self._shared.clone())
                replica.learner.outer = copies[replica.side]
        self._fork = self._shared.anchor.clone()

    def on_heal(self, winner: Replica, losers: Sequence[Replica]) -> None:
        """The others keep what they learned since the split on top of the winning anchor; with gradients, nothing."""
        recipe = self.setup.recipe
        for replica in losers:
            if replica.learner is None or winner.learner is None:
                continue
            if recipe.payload == "gradient" or isinstance(recipe.merge, Eager):
                self._copy_state(replica.learner, winner.learner)
            elif self._shared is not None:
                replica.learner.parameters.add_(winner.learner.outer.anchor - self._fork)
                replica.learner.take_lineage(winner.learner.outer)
        if self._shared is not None and winner.learner is not None:
            self._shared = winner.learner.outer

    def _copy_state(self, learner: Learner, donor: Learner) -> None:
        """All but what is a peer's own: its data, its moments between rounds, its residual."""
        recipe = self.setup.recipe
        if recipe.shared_anchor:
            learner.outer = donor.outer
        else:
            learner.outer.copy_from(donor.outer)
        if recipe.payload == "delta":
            learner.take_anchor()
        else:
            learner.parameters.copy_(donor.parameters)
        if recipe.payload == "gradient":
            learner.optimizer.copy_from(donor.optimizer)
        learner.previous, learner.current = donor.previous, donor.current
        if learner.estimate is not None:
            learner.estimate.copy_(learner.parameters)
        if donor.shadow is not None:
            learner.restart_shadow(donor.shadow.anchor)

    # building -----------------------------------------------------------------------------------------------------

    def _replica(self, index: int, profile: PeerProfile) -> Replica:
        learner = self._learner(index) if self.task is not None else None
        return Replica(
            index=index, profile=profile, learner=learner, steps_per_round=self.setup.recipe.steps_per_round,
            unsent_tokens=[0] * len(self.fragments),
        )

    def _learner(self, index: int) -> Learner:
        task, recipe = _given(self.task), self.setup.recipe
        parameters = task.initial()
        if self._scratch is None:
            self._scratch = torch.empty_like(parameters)
        replays = isinstance(recipe.local, Replay)
        optimizer = self._build_optimizer(parameters)
        learner = Learner(
            task=task, recipe=recipe, inner=self._inner, parameters=parameters, optimizer=optimizer,
            batches=task.batches(index),
            gradient=torch.empty_like(parameters) if recipe.payload == "gradient" else self._scratch,
            outer=self._outer(task), encoders=self._encoders(index),
            spider=Spider() if replays else None,
            estimate=parameters.clone() if isinstance(recipe.merge, Accelerated) else None,
            base=parameters.clone() if self._anchor_may_run_ahead() else None,
        )
        if replays:
            copy = parameters.clone()
            learner.shadow = Shadow(parameters.clone(), copy, self._build_optimizer(copy))
        return learner

    def _anchor_may_run_ahead(self) -> bool:
        """Whether a peer can be on its way from another anchor than the one that all share by then."""
        recipe = self.setup.recipe
        return recipe.payload == "delta" and recipe.shared_anchor and self._some_miss_rounds()

    def _some_miss_rounds(self) -> bool:
        setup = self.setup
        stay = all(profile.presence == PeerProfile().presence for profile in setup.profiles) and not setup.partitions
        return not (waits_for_all(setup.recipe.straggler) and stay)

    def _rounds_may_fail(self) -> bool:
        """Whether a contribution can be made for a round that comes to nothing: at the latest when training ends."""
        paces = {(profile.speed, profile.jitter > 0.0) for profile in self.setup.profiles}
        in_step = len(paces) == 1 and not any(jitters for _, jitters in paces)
        votes = isinstance(self.setup.recipe.schedule, GradientChange)
        return self.setup.recipe.feedback is not None and (votes or not in_step or self._some_miss_rounds())

    def _outer(self, task: Task) -> OuterCopy:
        recipe = self.setup.recipe
        if recipe.shared_anchor and self._shared is not None:
            return self._shared
        if recipe.payload == "parameters" or (recipe.payload == "gradient" and not recipe.accumulates):
            outer = OuterCopy(torch.empty(0), [])
        else:
            anchor = task.initial()
            outer = OuterCopy(anchor, [torch.full_like(anchor, value) for value in recipe.optimizer.initial_values])
        if recipe.shared_anchor:
            self._shared = outer
        return outer

    def _encoders(self, index: int) -> list[Encoder]:
        recipe, encoders = self.setup.recipe, []
        for fragment, length in enumerate(self.sync.lengths):
            own = self.sync.codecs[fragment]
            if isinstance(recipe.allocator, AdaptiveTopK):
                own = codec(self._thinned(recipe.allocator, index)).bind(self.sync.shapes[fragment])
            encoders.append(Encoder(own, recipe.feedback, length, revertible=self._rounds_may_fail()))
        return encoders

    def _thinned(self, allocator: AdaptiveTopK, index: int) -> str:
        ratio = allocator.ratios(_links(self.setup.profiles))[index]
        values = self.setup.recipe.compressor.partition("+")[2]
        return f"top{max(1, round(4096 * ratio))}/4096+{values}"

    # measuring ----------------------------------------------------------------------------------------------------

    def _measure(self, engine: Engine, task: Task, *, final: bool = False) -> float:
        loss = task.validate(self.consensus(), final=final)
        self._points.append(
            Point(
                tokens=engine.tally.steps * self._tokens_per_step,
                bytes_sent_per_peer=self._bytes_per_peer(),
                virtual_seconds=engine.now,
                val_loss=loss,
            )
        )
        return loss

    def _bytes_per_peer(self) -> float:
        return sum(replica.bytes_sent for replica in self.replicas) / len(self.replicas)

    def _result(self, engine: Engine, loss: float | None, wall_s: float) -> Result:
        count, sent = len(self.replicas), self._bytes_per_peer()
        reference = ring_allreduce_bytes(self.layout.numel, count) * engine.tally.steps / count
        present = sum(replica.present_s for replica in self.replicas)
        return Result(
            recipe=self.setup.recipe.name,
            seed=self.setup.seed,
            peers=count,
            tokens=engine.tally.steps * self._tokens_per_step,
            val_loss=loss,
            bytes_sent_per_peer=sent,
            reduction_vs_ddp=reference / sent if sent > 0 else None,
            virtual_seconds=engine.now,
            utilization=sum(replica.busy_s for replica in self.replicas) / present if present > 0 else 0.0,
            wall_seconds=wall_s,
            curve=tuple(self._points),
            tally=engine.tally,
        )


def fragments_of(recipe: Recipe, layout: FlatLayout) -> list[Ranges]:
    """Ranges of the flat vector per fragment: one for everything, unless the schedule is strided."""
    if isinstance(recipe.schedule, Strided):
        return list(strided_fragments(layout.names, layout.shapes, num_fragments=recipe.schedule.num_fragments))
    return [((0, layout.numel),)]


def _given(value: T | None) -> T:
    assert value is not None
    return value
