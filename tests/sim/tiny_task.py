"""A language model of 416 parameters, which learns in a fraction of a second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.state.flat_layout import FlatLayout

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
        self.device = torch.device("cpu")
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
