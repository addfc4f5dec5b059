"""Manifest + recipe + scenario -> a simulated run and its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from peer.outer.math.ranges import Ranges
from peer.outer.optim.inner_lr import learning_rate
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout, strided_fragments
from peer.protocol.manifest import InnerSpec
from peer.sim.engine.learners import LearnerFactory
from peer.sim.engine.lineages import Lineages
from peer.sim.engine.loop import Engine
from peer.sim.engine.swarm import Pace, SimSwarm, Tally, heaviest_side
from peer.sim.learner.replica import SimReplica
from peer.sim.learner.task import CPU, Task
from peer.sim.round.aggregation import Synchroniser
from peer.sim.world.network import ring_allreduce_bytes
from peer.sim.world.overlap import layers_of
from peer.sim.world.scenario import NetworkSplit, PeerProfile

T = TypeVar("T")
OnProgress = Callable[[int, int, float | None, float], None]


@dataclass(frozen=True, kw_only=True)
class SimulationSetup:
    """One simulation.

    Attributes:
        tokens: that all peers together learn from.
        step_s: seconds of an inner step at speed 1.
        evaluations: points of the loss curve before the end.
        layerwise: layers are sent one by one during steps, see `peer.sim.world.overlap`; else all after the step.
    """

    recipe: Recipe
    inner: InnerSpec
    profiles: tuple[PeerProfile, ...]
    tokens: int
    seed: int = 0
    step_s: float = 1.0
    evaluations: int = 10
    partitions: tuple[NetworkSplit, ...] = ()
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


class LossCurve:
    """The loss of the anchor over a run: some points before the end, and the end.

    Args:
        goal: steps of the whole run.
        evaluations: points before the end.
    """

    def __init__(self, goal: int, evaluations: int) -> None:
        self._goal = goal
        self._marks = [goal * k // evaluations for k in range(1, evaluations)]
        self.points: list[Point] = []

    @property
    def last(self) -> float | None:
        """The newest loss."""
        return self.points[-1].val_loss if self.points else None

    def take_mark(self, steps: int) -> bool:
        """Whether a point is due after so many steps; says so once."""
        due = bool(self._marks) and self._marks[0] <= steps < self._goal
        if due:
            self._marks.pop(0)
        return due


class Simulation:
    """One run: builds the swarm, watches the clock, evaluates the anchor.

    Args:
        task: what the peers learn; None simulates time and traffic alone.
        layout: of the parameters, where there is no task.
        tokens_per_step: of one peer, where there is no task.
        progress: (steps made, steps in all, last validation loss, virtual seconds).
    """

    def __init__(
        self,
        setup: SimulationSetup,
        task: Task | None,
        layout: FlatLayout | None = None,
        tokens_per_step: int | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        self.task = task
        self.layout = task.layout if task is not None else _given(layout)
        self._tokens_per_step = task.tokens_per_step if task is not None else _given(tokens_per_step)
        self._progress = progress
        count = len(setup.profiles)
        self._goal = count * max(1, math.ceil(setup.tokens / (self._tokens_per_step * count)))
        recipe = setup.recipe.with_inner(setup.inner).lasting(setup.recipe.rounds_within(self._goal // count))
        self.setup = setup = replace(setup, recipe=recipe)
        self.fragments = fragments_of(recipe, self.layout)
        self._inner = recipe.inner_settings(setup.inner)
        nominal = self._tokens_per_step * max(1, recipe.steps_per_round) * 2
        device = CPU if task is None else task.device
        self.sync = Synchroniser(recipe, self.layout, self.fragments, setup.seed, nominal, count, device)
        self._assembly = None
        if task is not None:
            self._assembly = LearnerFactory(task, recipe, self._inner, self.sync, setup.profiles, setup.partitions)
        self.replicas = [self._replica(index, profile) for index, profile in enumerate(setup.profiles)]
        self._curve = LossCurve(self._goal, setup.evaluations)

    def _replica(self, index: int, profile: PeerProfile) -> SimReplica:
        learner = self._assembly.learner(index) if self._assembly is not None else None
        return SimReplica(index=index, profile=profile, learner=learner, unsent_tokens=[0] * len(self.fragments))

    def run(self) -> Result:
        """Simulate.

        Raises:
            UserError: the swarm died before it reached its goal.
        """
        began = time.perf_counter()
        setup = self.setup
        swarm = SimSwarm(setup.recipe, self.replicas, self.sync, self._pace())
        lineages = Lineages(setup.recipe, self.replicas, self._assembly)
        engine = Engine(swarm, lineages, self._on_step, setup.partitions, setup.seed)
        if self.task is not None:
            self._measure(self.task, 0, 0.0)
        engine.run()
        loss = None
        if self.task is not None:
            loss = self._measure(self.task, swarm.tally.steps, swarm.clock.now, final=True)
        return self._result(swarm.tally, loss, swarm.clock.now, time.perf_counter() - began)

    def _pace(self) -> Pace:
        setup, steps = self.setup, self._goal // len(self.replicas)
        return Pace(
            goal_steps=self._goal,
            step_s=setup.step_s,
            tokens_per_step=self._tokens_per_step,
            learning_rate=lambda step, since_join: learning_rate(self._inner, step, steps, since_join),
            layers=layers_of(self.layout, self.fragments) if setup.layerwise else (),
        )

    def consensus(self) -> Tensor:
        """The parameters that represent the swarm, fp32 [P].

        The anchor, or the recipe's average of anchors; in gossip the mean of the peers' own; with gradients any peer's.
        """
        recipe, side = self.setup.recipe, heaviest_side(self.replicas)
        replicas = sorted((r for r in self.replicas if r.learner is not None), key=lambda r: (r.side != side, r.index))
        replicas = [r for r in replicas if r.present] or replicas
        learners = [learner for r in replicas if (learner := r.learner) is not None]
        # Between two rounds that are voted for, the peers' own parameters are all there is.
        own = recipe.payload != "delta" or recipe.votes is not None
        vectors = [learner.parameters if own else learner.outer.anchor for learner in learners]
        if recipe.shared_anchor and (recipe.average or not own):
            outer = learners[0].outer
            return recipe.optimizer.result(outer.anchor, outer.buffers, outer.rounds)
        if recipe.payload == "gradient":
            return vectors[0]
        mean = torch.zeros_like(vectors[0])
        for vector in vectors:
            mean.add_(vector, alpha=1.0 / len(vectors))
        return mean

    # measuring ----------------------------------------------------------------------------------------------------

    def _on_step(self, steps: int, now_s: float) -> None:
        if self.task is not None and self._curve.take_mark(steps):
            self._measure(self.task, steps, now_s)
        if self._progress is not None:
            self._progress(steps, self._goal, self._curve.last, now_s)

    def _measure(self, task: Task, steps: int, now_s: float, *, final: bool = False) -> float:
        loss = task.validate(self.consensus(), final=final)
        self._curve.points.append(
            Point(
                tokens=steps * self._tokens_per_step,
                bytes_sent_per_peer=self._bytes_per_peer(),
                virtual_seconds=now_s,
                val_loss=loss,
            )
        )
        return loss

    def _bytes_per_peer(self) -> float:
        return sum(replica.bytes_sent for replica in self.replicas) / len(self.replicas)

    def _result(self, tally: Tally, loss: float | None, virtual_s: float, wall_s: float) -> Result:
        count, sent = len(self.replicas), self._bytes_per_peer()
        reference = ring_allreduce_bytes(self.layout.numel, count) * tally.steps / count
        present_s = sum(replica.present_s for replica in self.replicas)
        return Result(
            recipe=self.setup.recipe.name,
            seed=self.setup.seed,
            peers=count,
            tokens=tally.steps * self._tokens_per_step,
            val_loss=loss,
            bytes_sent_per_peer=sent,
            reduction_vs_ddp=reference / sent if sent > 0 else None,
            virtual_seconds=virtual_s,
            utilization=sum(replica.busy_s for replica in self.replicas) / present_s if present_s > 0 else 0.0,
            wall_seconds=wall_s,
            curve=tuple(self._curve.points),
            tally=tally,
        )


def fragments_of(recipe: Recipe, layout: FlatLayout) -> list[Ranges]:
    """Ranges of the flat vector per fragment: one for everything, unless the schedule is strided."""
    if recipe.num_fragments > 1:
        return list(strided_fragments(layout.names, layout.shapes, cut=recipe.cut))
    return [((0, layout.numel),)]


def _given(value: T | None) -> T:
    assert value is not None
    return value
