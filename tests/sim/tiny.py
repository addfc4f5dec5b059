"""Simulations of swarms that learn the tiny task, what they leave behind, and how to compare it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.outer.recipe.recipe import Recipe
from peer.outer.recipe.resolve import resolve
from peer.protocol.manifest import InnerSpec, RecipeSpec
from peer.sim.campaign.simulation import Result, Simulation, SimulationSetup
from peer.sim.learner.inner_optimizers import inner_optimizer
from peer.sim.learner.replica import SimReplica, clip_
from peer.sim.round.contribution import CommittedRound
from peer.sim.world.scenario import NetworkSplit, PeerProfile
from tests.sim.tiny_task import TinyTask

ADAMW = InnerSpec(optimizer="adamw", learning_rate=0.02, warmup_steps=0, min_learning_rate_ratio=1.0)
SGD = ADAMW.model_copy(update={"optimizer": "sgd", "learning_rate": 0.2, "max_grad_norm": 1e9})
PUBLISHED = ADAMW.model_copy(update={"optimizer": None})
"""The optimizer that the recipe was published with."""


@dataclass(frozen=True)
class Run:
    """A finished simulation."""

    simulation: Simulation
    result: Result
    consensus: Tensor

    @property
    def locals(self) -> list[Tensor]:
        """The parameters of each peer."""
        return [replica.learner.parameters for replica in self.simulation.replicas if replica.learner is not None]

    @property
    def loss(self) -> float:
        """Of the consensus on the validation data."""
        assert self.result.val_loss is not None
        return self.result.val_loss


Watch = Callable[[Simulation], None]


def recipe_of(name: str, **overrides: Any) -> Recipe:
    """A published recipe with parts and numbers of a manifest."""
    return resolve(RecipeSpec.model_validate({"name": name, **overrides}))


def simulate(
    recipe: Recipe | str,
    *,
    peers: int = 4,
    steps: int = 40,
    inner: InnerSpec = ADAMW,
    profiles: Sequence[PeerProfile] | None = None,
    partitions: Sequence[NetworkSplit] = (),
    seed: int = 0,
    evaluations: int = 1,
    prepare: Watch | None = None,
    watch: Watch | None = None,
    task: TinyTask | None = None,
    **overrides: Any,
) -> Run:
    """Run a recipe, or a published one by name with overrides as in a manifest, for `steps` steps of each peer.

    Args:
        recipe: or its name.
        peers: how many, where no profiles are given.
        steps: of each peer.
        inner: of all peers.
        profiles: one per peer; by default equal ones on an ideal network.
        partitions: of the network.
        seed: of the simulation; the task is always the same.
        evaluations: points of the loss curve, the end included.
        prepare: called before the first step.
        watch: called after every inner step of any peer, before what it causes.
        task: instead of a new `TinyTask`.
        overrides: keys of `RecipeSpec`.
    """
    built = recipe_of(recipe, **overrides) if isinstance(recipe, str) else recipe
    everyone = tuple(profiles) if profiles is not None else (PeerProfile(),) * peers
    learned = TinyTask() if task is None else task
    setup = SimulationSetup(
        recipe=built, inner=inner, profiles=everyone, tokens=steps * learned.tokens_per_step * len(everyone),
        seed=seed, evaluations=evaluations, partitions=tuple(partitions),
    )
    simulation = Simulation(setup, learned, progress=lambda *_: watch(simulation) if watch is not None else None)
    if prepare is not None:
        prepare(simulation)
    result = simulation.run()
    return Run(simulation, result, simulation.consensus().clone())


@dataclass(frozen=True)
class Commit:
    """A committed round: who took part, and every peer's parameters and anchor before it."""

    fragment: int
    number: int
    members: tuple[int, ...]
    locals: list[Tensor]
    anchors: list[Tensor]
    dropped: list[int]


def commits_of(
    recipe: Recipe | str, *, prepare: Watch | None = None, **arguments: Any
) -> tuple[Run, list[Commit]]:
    """A run and all its rounds, in their order; the closing one after the last step is among them."""
    commits: list[Commit] = []

    def spy_on(simulation: Simulation) -> None:
        if prepare is not None:
            prepare(simulation)
        commit = simulation.sync.commit

        def spy(members: Sequence[SimReplica], *rest: Any) -> CommittedRound:
            learners = [replica.learner for replica in simulation.replicas if replica.learner is not None]
            before = [learner.parameters.clone() for learner in learners]
            anchors = [learner.outer.anchor.clone() for learner in learners]
            outcome = commit(members, *rest)
            indices = tuple(replica.index for replica in members)
            commits.append(Commit(rest[1], rest[2], indices, before, anchors, outcome.dropped))
            return outcome

        simulation.sync.commit = spy  # type: ignore[method-assign]

    return simulate(recipe, prepare=spy_on, **arguments), commits


def alone(peer: int, steps: int, inner: InnerSpec = ADAMW, task: TinyTask | None = None) -> Tensor:
    """The parameters of one peer after `steps` inner steps without any swarm."""
    learned = TinyTask() if task is None else task
    parameters, batches = learned.initial(), learned.batches(peer)
    optimizer = inner_optimizer(str(inner.optimizer), learned.layout, inner)(parameters)
    gradient = torch.empty_like(parameters)
    for _ in range(steps):
        learned.gradient(parameters, next(batches), gradient)
        clip_(gradient, inner.max_grad_norm)
        optimizer.step(gradient, inner.learning_rate)
    return parameters


def scatter(simulation: Simulation) -> None:
    """Give every peer parameters, and in gossip an anchor, of its own."""
    generator = torch.Generator().manual_seed(0)
    for replica in simulation.replicas:
        assert replica.learner is not None
        replica.learner.parameters.copy_(torch.randn(simulation.layout.numel, generator=generator))
        if replica.learner.outer.anchor.numel() and not simulation.setup.recipe.shared_anchor:
            replica.learner.outer.anchor.copy_(replica.learner.parameters)
        if replica.learner.estimate is not None:
            replica.learner.estimate.copy_(replica.learner.parameters)


def close(left: Tensor, right: Tensor, tolerance: float = 2e-6) -> None:
    """Assert that no element differs by more than `tolerance`."""
    torch.testing.assert_close(left, right, rtol=0.0, atol=tolerance)


def spread(vectors: Sequence[Tensor]) -> float:
    """The largest distance from the mean."""
    mean = torch.stack(list(vectors)).mean(0)
    return max(float((vector - mean).norm()) for vector in vectors)
