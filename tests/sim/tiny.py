"""A language model of 416 parameters, and simulations of swarms that learn it in a fraction of a second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.compose import resolve
from peer.outer.fragments import FlatLayout
from peer.outer.recipes import Recipe
from peer.protocol.manifest import InnerSpec, RecipeSpec
from peer.sim.inner import inner_optimizer
from peer.sim.replica import Replica, clip_
from peer.sim.scenario import Partition, PeerProfile
from peer.sim.simulate import Result, Setup, Simulation
from peer.sim.sync import Outcome

VOCAB, WIDTH, LAYERS, BATCH = 12, 8, 3, 16
SHAPES = {
    "model.embed.weight": (VOCAB, WIDTH),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in (("norm", (WIDTH,)), ("w", (WIDTH, WIDTH)))
    },
    "model.norm": (WIDTH,),
    "lm_head.weight": (VOCAB, WIDTH),
}
ADAMW = InnerSpec(optimizer="adamw", learning_rate=0.02, warmup_steps=0, min_learning_rate_ratio=1.0)
SGD = ADAMW.model_copy(update={"optimizer": "sgd", "learning_rate": 0.2, "max_grad_norm": 1e9})
PUBLISHED = ADAMW.model_copy(update={"optimizer": None})
"""The optimizer that the recipe was published with."""

Floats = NDArray[np.float64]


def layout() -> FlatLayout:
    """Of the model's parameters."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    offsets = (0, *itertools.accumulate(sizes))
    return FlatLayout(
        names=tuple(SHAPES), shapes=tuple(SHAPES.values()), offsets=offsets[:-1], numel=offsets[-1]
    )


class TinyTask:
    """The next of 12 tokens from the last: h <- h + tanh(h s) W three times, then softmax. Implements `Task`.

    Loss and gradient are computed in float64 and rounded to fp32 once, so that they are the same on every machine up
    to a last bit now and then. Every peer draws from the same distribution, in an order of its own.

    Args:
        seed: of the initial parameters, the distribution and the batches.
    """

    def __init__(self, seed: int = 0) -> None:
        self.layout = layout()
        self.tokens_per_step = BATCH
        self._seed = seed
        offsets = (*self.layout.offsets, self.layout.numel)
        cuts = itertools.starmap(slice, itertools.pairwise(offsets))
        self._cuts = list(zip(cuts, SHAPES.values(), strict=True))
        random = np.random.RandomState(1000 + seed)
        self._initial = [
            np.ones(shape) if len(shape) == 1 else random.standard_normal(shape) / math.sqrt(WIDTH)
            for shape in SHAPES.values()
        ]
        self._next = _distribution(seed)

    def initial(self) -> Tensor:
        """See `Task.initial`."""
        return torch.from_numpy(np.concatenate([value.ravel() for value in self._initial])).float()

    def batches(self, peer: int) -> Iterator[Tensor]:
        """See `Task.batches`; int64 [B, 2] each: a token and the next. After 256 they come again."""
        return itertools.cycle(_batches(self._seed, peer))

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:
        """See `Task.gradient`."""
        last, following = batch.numpy().T
        count = len(last)
        embed, layers, scale, head = self._weights(parameters)
        states, inner, hidden = self._forward(embed[last], layers)
        probabilities = _softmax((hidden * scale) @ head.T)
        loss = -_log(probabilities[np.arange(count), following]).mean()
        probabilities[np.arange(count), following] -= 1.0
        probabilities /= count
        gradients: list[Floats] = [probabilities.T @ (hidden * scale)]
        back = probabilities @ head
        gradients.append((back * hidden).sum(axis=0))
        back = back * scale
        for (norm, matrix), state, tanh in zip(layers[::-1], states[::-1], inner[::-1], strict=True):
            gradients.append(tanh.T @ back)
            slope = (back @ matrix.T) * (1.0 - tanh * tanh)
            gradients.append((slope * state).sum(axis=0))
            back = back + slope * norm
        gradients.append(np.equal.outer(np.arange(VOCAB), last) @ back)
        out.copy_(torch.from_numpy(np.concatenate([gradient.ravel() for gradient in gradients[::-1]])))
        return float(loss)

    def validate(self, parameters: Tensor, *, final: bool) -> float:  # noqa: ARG002
        """See `Task.validate`: the cross-entropy with the true distribution itself."""
        embed, layers, scale, head = self._weights(parameters)
        probabilities = _softmax((self._forward(embed, layers)[2] * scale) @ head.T)
        return float(-(self._next * _log(probabilities)).sum(axis=1).mean())

    def _weights(self, parameters: Tensor) -> tuple[Floats, list[tuple[Floats, Floats]], Floats, Floats]:
        flat = parameters.numpy().astype(np.float64)
        embed, *inside, scale, head = (flat[cut].reshape(shape) for cut, shape in self._cuts)
        return embed, list(zip(inside[::2], inside[1::2], strict=True)), scale, head

    def _forward(
        self, hidden: Floats, layers: Sequence[tuple[Floats, Floats]]
    ) -> tuple[list[Floats], list[Floats], Floats]:
        states, inner = [], []
        for norm, matrix in layers:
            states.append(hidden)
            inner.append(np.tanh(hidden * norm))
            hidden = hidden + inner[-1] @ matrix
        return states, inner, hidden


def _softmax(logits: Floats) -> Floats:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Floats = raised / raised.sum(axis=1, keepdims=True)
    return probabilities


def _log(probabilities: Floats) -> Floats:
    """Finite where training has diverged so far that a probability is 0."""
    return np.log(np.maximum(probabilities, 1e-300))


def _distribution(seed: int) -> Floats:
    """[VOCAB, VOCAB]: the chance of each token after each."""
    random = np.random.RandomState(2000 + seed)  # whose stream numpy has promised not to change
    return _softmax(2.0 * random.standard_normal((VOCAB, VOCAB)))


@lru_cache
def _batches(seed: int, peer: int) -> tuple[Tensor, ...]:
    random = np.random.RandomState(1000 * seed + peer)
    last = random.randint(VOCAB, size=(256, BATCH))
    passed = random.random_sample((256, BATCH, 1)) > _distribution(seed).cumsum(axis=1)[last]
    following = passed.sum(axis=2).clip(max=VOCAB - 1)
    return torch.from_numpy(np.stack([last, following], axis=2)).unbind()


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
    partitions: Sequence[Partition] = (),
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
    setup = Setup(
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

        def spy(members: Sequence[Replica], *rest: Any) -> Outcome:
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


class StillTask(TinyTask):
    """Nothing to learn: with SGD, parameters change by what peers exchange, and by nothing else."""

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:  # noqa: ARG002
        """See `Task.gradient`."""
        out.zero_()
        return 0.0


class DriftTask(TinyTask):
    """Every step of every peer moves every parameter by the learning rate: what was learned can be counted."""

    def initial(self) -> Tensor:
        """See `Task.initial`."""
        return torch.zeros(self.layout.numel)

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:  # noqa: ARG002
        """See `Task.gradient`."""
        out.fill_(-1.0)
        return 0.0


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
