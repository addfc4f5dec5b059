"""The inner optimizers as outer ones, for recipes whose peers make every step together (`ddp`).

All peers hold the same moments as part of the outer state: certified, replayed and handed to newcomers. The rate of a
step is `lr_scale`. The rules of `peer.outer.optim.optimizers` hold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from peer.outer.numerics.ordered_sums import norm
from peer.outer.optim.optimizers import Descent, Step, Vectors
from peer.protocol.manifest import InnerSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the quintic that converges fastest from any singular value
ITERATIONS = 5
UPDATE_RMS = 0.2  # of an AdamW step (arXiv 2502.16982, equation 4)
BATCH_ELEMENTS = 1 << 22  # of matrices that are turned at once: a few times 32 MiB
CPU = torch.device("cpu")
_GRID = 2.0**24  # rows and columns are shorter than 4: sums of their integer products stay below 2^53, hence exact


@dataclass(frozen=True, kw_only=True)
class EveryStep(Descent):
    """One step of a large batch.

    Attributes:
        max_norm: what the averaged gradient is clipped to; None where peers clip their own.
        weight_decay: decoupled, of matrices.
        decaying: [start, stop) of the matrices in the flat vector; made by `shaped`.
    """

    lr: float = 1.0
    max_norm: float | None = None
    weight_decay: float = 0.0
    decaying: tuple[tuple[int, int], ...] = field(default=(), metadata={"bound": True})

    def shaped(self, shapes: Sequence[tuple[int, ...]], hidden: Sequence[int] = ()) -> EveryStep:  # noqa: ARG002
        return replace(self, decaying=_decaying(shapes))

    def _decayed(self, old: Vectors, new: Vectors, step: Step) -> Tensor:
        """The new anchor, so far only decayed."""
        anchor = torch.mul(old.anchor, 1.0, out=new.anchor)
        end, first = step.start + anchor.numel(), bisect_right(self.decaying, (step.start, math.inf)) - 1
        for start, stop in self.decaying[max(0, first) :]:
            if start >= end:
                break
            anchor[max(0, start - step.start) : max(0, stop - step.start)].mul_(1.0 - step.lr * self.weight_decay)
        return anchor


@dataclass(frozen=True, kw_only=True)
class SgdSteps(EveryStep):
    """x <- x - lr g."""

    @property
    def initial_values(self) -> tuple[float, ...]:
        """No buffers."""
        return ()

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        torch.sub(old.anchor, aggregate * step.lr, out=new.anchor)


@dataclass(frozen=True, kw_only=True)
class AdamWSteps(EveryStep):
    """AdamW (arXiv 1711.05101, algorithm 2) with bias correction, as `torch.optim.AdamW`."""

    betas: tuple[float, float]
    eps: float

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Two buffers: the moments m and v."""
        return (0.0, 0.0)

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        (m, v), (beta1, beta2) = new.buffers, self.betas
        torch.mul(old.buffers[0], beta1, out=m).add_(aggregate * (1.0 - beta1))
        torch.mul(old.buffers[1], beta2, out=v).add_((aggregate * aggregate).mul_(1.0 - beta2))
        rate = step.lr / (1.0 - _power(beta1, step.round + 1))
        correction = math.sqrt(1.0 - _power(beta2, step.round + 1))
        self._decayed(old, new, step).sub_((m * rate).div_(v.sqrt().div_(correction).add_(self.eps)))


@dataclass(frozen=True, kw_only=True)
class MuonSteps(AdamWSteps):
    """Muon on the matrices of the blocks, AdamW on the rest; see `peer.train.muon`.

    Attributes:
        hidden: (start, rows, columns) of those matrices in the flat vector, which is stepped as a whole.
        device: where the matrices are turned; the same bits on any.
    """

    momentum: float
    lr_ratio: float
    hidden: tuple[tuple[int, int, int], ...] = field(default=(), metadata={"bound": True})
    device: torch.device = field(default=CPU, metadata={"bound": True})

    @property
    def elementwise(self) -> bool:
        return not self.hidden

    def shaped(self, shapes: Sequence[tuple[int, ...]], hidden: Sequence[int] = ()) -> MuonSteps:
        starts = list(accumulate(map(math.prod, shapes), initial=0))
        matrices = tuple((starts[index], shapes[index][0], shapes[index][1]) for index in hidden)
        return replace(self, decaying=_decaying(shapes), hidden=matrices)

    def computing_on(self, device: torch.device) -> MuonSteps:
        return replace(self, device=device)

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        first = 0
        for start, rows, columns in (*self.hidden, (aggregate.numel(), 0, 0)):
            if first < start:
                own, rest = slice(first, start), replace(step, start=step.start + first)
                super()._descend(_part(old, own), aggregate[own], _part(new, own), rest)
            first = start + rows * columns
        for shape in dict.fromkeys(matrix[1:] for matrix in self.hidden):
            numel = math.prod(shape)
            alike = [slice(start, start + numel) for start, *own in self.hidden if tuple(own) == shape]
            most = max(1, BATCH_ELEMENTS // numel)
            for begin in range(0, len(alike), most):
                self._turn(old, aggregate, new, alike[begin : begin + most], shape, step.lr * self.lr_ratio)

    def _turn(
        self, old: Vectors, gradient: Tensor, new: Vectors, alike: Sequence[slice], shape: tuple[int, int], lr: float
    ) -> None:
        """The step of some matrices of one shape."""
        directions = []
        for own in alike:
            momentum = torch.mul(old.buffers[0][own], self.momentum, out=new.buffers[0][own]).add_(gradient[own])
            new.buffers[1][own] = old.buffers[1][own]
            directions.append((momentum * self.momentum).add_(gradient[own]).view(shape))
        turned_brc = orthogonal(torch.stack(directions), self.device)
        scale = lr * UPDATE_RMS * math.sqrt(max(shape))
        for own, turned in zip(alike, turned_brc.mul_(scale), strict=True):
            torch.mul(old.anchor[own], 1.0 - lr * self.weight_decay, out=new.anchor[own]).sub_(turned.flatten())


def orthogonal(matrices_brc: Tensor, device: torch.device = CPU) -> Tensor:
    """Roughly the nearest semi-orthogonal matrices, as `peer.train.muon.orthogonalise`; the same bits on every machine.

    Products are of float64 matrices that hold integers below 2^26: their sums are exact in any order.

    Args:
        matrices_brc: fp32 [b, r, c] in RAM.
        device: where the products are computed.

    Returns:
        A new fp32 [b, r, c] in RAM.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices_brc.shape[1] > matrices_brc.shape[2]
    norms_b11 = torch.tensor([[[norm(matrix.flatten()) + 1e-7]] for matrix in matrices_brc], dtype=torch.float64)
    x = (matrices_brc.mT if tall else matrices_brc).to(device).double() / norms_b11.to(device)
    for _ in range(ITERATIONS):
        gram = _product(x, x.mT)
        x = x * a + _product(gram * b + _product(gram, gram) * c, x)
    return (x.mT if tall else x).float().contiguous().to(CPU)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return (left * _GRID).round_() @ (right * _GRID).round_() / _GRID**2


def _part(vectors: Vectors, own: slice) -> Vectors:
    return Vectors(vectors.anchor[own], [buffer[own] for buffer in vectors.buffers])


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon takes this parameter: a matrix inside a transformer block, told by the number in its name."""
    return len(shape) == 2 and any(part.isdigit() for part in name.split("."))


def every_step(inner: InnerSpec, max_norm: float | None) -> EveryStep:
    """What makes every step of a run whose peers share the optimizer that its manifest names."""
    if inner.optimizer == "sgd":
        return SgdSteps(max_norm=max_norm)
    common: dict[str, Any] = {"max_norm": max_norm, "weight_decay": inner.weight_decay}
    common |= {"betas": inner.betas, "eps": inner.eps}
    if inner.optimizer == "muon":
        return MuonSteps(momentum=inner.muon_momentum, lr_ratio=inner.muon_learning_rate_ratio, **common)
    return AdamWSteps(**common)


def _decaying(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    found, start = list[tuple[int, int]](), 0
    for shape in shapes:
        stop = start + math.prod(shape)
        if len(shape) >= 2:
            found.append((found.pop()[0] if found and found[-1][1] == start else start, stop))
        start = stop
    return tuple(found)


def _power(base: float, exponent: int) -> float:
    """By squaring: a library's power rounds differently on other machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
