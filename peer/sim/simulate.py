"""Manifest + recipe + scenario -> a simulated run and its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from peer.outer.allocate import AdaptiveTopK
from peer.outer.compress.feedback import Encoder
from peer.outer.compress.registry import codec
from peer.outer.fragments import FlatLayout
from peer.outer.local import Replay, Spider
from peer.outer.merging import Accelerated
from peer.outer.recipes import Recipe
from peer.outer.schedules import Strided, strided_fragments
from peer.outer.straggler import Quorum, WaitAll
from peer.protocol.manifest import InnerSpec
from peer.sim.engine import Engine, Hooks, Pace, Tally, _links
from peer.sim.inner import inner_optimizer
from peer.sim.network import ring_allreduce_bytes
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
    """

    recipe: Recipe
    inner: InnerSpec
    profiles: tuple[PeerProfile, ...]
    tokens: int
    seed: int = 0
    step_s: float = 1.0
    evaluations: int = 10
    partitions: tuple[Partition, ...] = ()


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
        """The parameters that the swarm stands for, fp32 [P]: the anchor, or in gossip the mean of the peers' own."""
        learners = [r.learner for r in self.replicas if r.present and r.learner is not None] or [
            r.learner for r in self.replicas if r.learner is not None
        ]
        recipe = self.setup.recipe
        if recipe.shared_anchor and recipe.payload == "delta":
            return self._heaviest().anchor
        vectors = [learner.outer.anchor if recipe.payload == "delta" else learner.parameters for learner in learners]
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

    def on_join(self, engine: Engine, replica: Replica) -> None:
        """A newcomer takes the anchor and starts with fresh moments; with gradients, everything of another peer."""
        if replica.learner is None or self.task is None:
            return
        others = [r for r in engine.replicas if r.present and r is not replica and r.side == replica.side and r.learner]
        learner = replica.learner
        donor = others[0].learner if others else None
        if donor is None:
            return
        if not self.setup.recipe.shared_anchor:
            learner.outer.anchor.copy_(donor.outer.anchor)
            for mine, theirs in zip(learner.outer.buffers, donor.outer.buffers, strict=True):
                mine.copy_(theirs)
        else:
            learner.outer = donor.outer
        source = donor.parameters if self.setup.recipe.payload != "delta" else donor.outer.anchor
        learner.parameters.copy_(source)
        learner.optimizer = self._build_optimizer(learner.parameters)
        if self.setup.recipe.payload == "gradient":
            learner.optimizer.copy_from(donor.optimizer)
        else:
            replica.steps_since_join = 0
        if learner.base is not None:
            learner.base.copy_(learner.outer.anchor)
        if learner.estimate is not None:
            learner.estimate.copy_(learner.parameters)

    def on_split(self, engine: Engine) -> None:
        """Each side goes on with an outer state of its own."""
        copies: dict[tuple[int, int], OuterCopy] = {}
        self._forks = {}
        for replica in engine.replicas:
            if replica.learner is None:
                continue
            key = (id(replica.learner.outer), replica.side)
            if replica.side != 0:
                copies.setdefault(key, replica.learner.outer.clone())
                replica.learner.outer = copies[key]
        if self._shared is not None:
            self._forks = {0: self._shared.anchor.clone()}

    def on_heal(self, engine: Engine) -> None:
        """The side with more steps wins; the others keep what they learned since the split on top of its anchor."""
        learners = [(replica, replica.learner) for replica in engine.replicas if replica.learner is not None]
        if not learners or self._shared is None:
            return
        steps: dict[int, int] = {}
        for replica, _ in learners:
            steps[replica.side] = steps.get(replica.side, 0) + replica.steps
        winner = max(sorted(steps), key=lambda side: steps[side])
        outer = next(learner.outer for replica, learner in learners if replica.side == winner)
        for replica, learner in learners:
            if replica.side != winner:
                learner.parameters.add_(outer.anchor - self._forks[0])
                learner.outer = outer
                if learner.base is not None:
                    learner.base.copy_(outer.anchor)

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
        may_be_late = isinstance(recipe.straggler, Quorum) or (
            isinstance(recipe.straggler, WaitAll) and recipe.straggler.deadline_s is not None
        )
        learner = Learner(
            task=task, recipe=recipe, inner=self._inner, parameters=parameters, optimizer=optimizer,
            batches=task.batches(index),
            gradient=torch.empty_like(parameters) if recipe.payload == "gradient" else self._scratch,
            outer=self._outer(task), encoders=self._encoders(index),
            spider=Spider() if replays else None,
            estimate=parameters.clone() if isinstance(recipe.merge, Accelerated) else None,
            base=parameters.clone() if may_be_late and recipe.payload == "delta" else None,
        )
        if replays:
            copy = parameters.clone()
            learner.shadow = Shadow(parameters.clone(), copy, self._build_optimizer(copy))
        return learner

    def _outer(self, task: Task) -> OuterCopy:
        recipe = self.setup.recipe
        if recipe.shared_anchor and self._shared is not None:
            return self._shared
        if recipe.payload == "parameters" or (recipe.payload == "gradient" and not recipe.accumulates):
            outer = OuterCopy(torch.empty(0), [])
        else:
            anchor = task.initial()
            outer = OuterCopy(anchor, [torch.full_like(anchor, value) for value in recipe.outer.initial_values])
        if recipe.shared_anchor:
            self._shared = outer
        return outer

    def _encoders(self, index: int) -> list[Encoder]:
        recipe, encoders = self.setup.recipe, []
        for fragment, length in enumerate(self.sync.lengths):
            own = self.sync.codecs[fragment]
            if isinstance(recipe.allocator, AdaptiveTopK):
                own = codec(self._thinned(recipe.allocator, index)).bind(self.sync.shapes[fragment])
            encoders.append(Encoder(own, recipe.feedback, length))
        return encoders

    def _thinned(self, allocator: AdaptiveTopK, index: int) -> str:
        ratio = allocator.ratios(_links(self.setup.profiles))[index]
        values = self.setup.recipe.compressor.partition("+")[2]
        return f"top{max(1, round(4096 * ratio))}/4096+{values}"

    def _heaviest(self) -> OuterCopy:
        steps: dict[int, int] = {}
        for replica in self.replicas:
            steps[replica.side] = steps.get(replica.side, 0) + replica.steps
        side = max(sorted(steps), key=lambda s: steps[s])
        return next(_given(r.learner).outer for r in self.replicas if r.side == side)

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
