"""HeLoCo: what arrives late is turned towards the momentum before it moves the anchor (arXiv 2606.00271)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.numerics.ordered_sums import chunks, dot, norm
from peer.outer.optim.optimizers import Momentum, Step, Vectors


@dataclass(frozen=True, kw_only=True)
class Turned(Momentum):
    """Per tensor, with c the cosine of D and m, and trust = |D| / (|D| + kappa |m|):

        c < 0:       D <- D - min(shrink (-c) trust, most) c |D| m / |m|
        c < enough:  D <- |D| u / |u|,  u = (1 - l) D / |D| + l m / |m|,  l = min(turn (1 - c) trust, 1)
        m <- beta m + (1 - beta) D;  theta <- theta - lr (D + beta m)

    Peers start from where momentum alone would carry theta: anchor = theta - lr beta m. The run yields theta. Not
    elementwise: cosines need whole tensors.

    Attributes:
        sizes: elements of each tensor; made by `shaped`. None: all elements are one tensor.
    """

    enough: float = 0.2
    shrink: float = 0.5
    turn: float = 1.0
    kappa: float = 3.0
    most: float = 0.5
    sizes: tuple[int, ...] = field(default=(), metadata={"bound": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("enough", "shrink", "turn", "kappa", "most"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise UserError(f"{name}={getattr(self, name)}: must be finite and at least 0", "leave it out")
        if self.enough > 1.0:
            raise UserError(f"enough={self.enough}: no cosine is above 1", "published: 0.2")

    @property
    def elementwise(self) -> bool:
        return False

    def shaped(self, shapes: Sequence[tuple[int, ...]], hidden: Sequence[int] = ()) -> Self:  # noqa: ARG002
        return replace(self, sizes=tuple(size for shape in shapes if (size := math.prod(shape))))

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        (before,), (after,) = old.buffers, new.buffers
        sizes = list(self.sizes) if sum(self.sizes) == aggregate.numel() else [aggregate.numel()]
        turned = torch.cat([
            self._turned(d, m) for d, m in zip(torch.split(aggregate, sizes), torch.split(before, sizes), strict=True)
        ])  # fmt: skip
        theta = self._ahead(old.anchor, before, step.lr)
        torch.mul(before, self.momentum, out=after).add_(turned * (1.0 - self.momentum))
        theta.sub_((after * self.momentum).add_(turned).mul_(step.lr))
        torch.sub(theta, after * (step.lr * self.momentum), out=new.anchor)

    def result(self, anchor: Tensor, buffers: Sequence[Tensor], rounds: int) -> Tensor:  # noqa: ARG002
        """See `OuterOptimizer.result`: theta."""
        return self._ahead(anchor, buffers[0], self.lr)

    def _ahead(self, anchor: Tensor, momentum: Tensor, lr: float) -> Tensor:
        return anchor + momentum * (lr * self.momentum)

    def _turned(self, d: Tensor, m: Tensor) -> Tensor:
        length, pace = norm(d), norm(m)
        cosine = dot(d, m) / (length * pace) if length and pace else 1.0
        if cosine >= self.enough:
            return d
        trust = length / (length + self.kappa * pace)
        if cosine < 0.0:
            beta = min(self.shrink * -cosine * trust, self.most)
            kept, added = 1.0, -beta * cosine * length / pace
        else:
            part = min(self.turn * (1.0 - cosine) * trust, 1.0)
            kept, added = (1.0 - part) / length, part / pace
        mixed = torch.empty_like(d)
        for chunk in chunks(d.numel()):  # in float64: 1 / pace may lie beyond fp32's range
            mixed[chunk] = d[chunk].double() * kept + m[chunk].double() * added
        return mixed if cosine < 0.0 else mixed.mul_(length / norm(mixed))
