"""Outer optimizers: elementwise, in place, with multiplications and additions kept apart.

Each operation is one IEEE rounding, so that every CPU computes the same bits, whole or in chunks. A fused
multiply-add (`alpha=`, `addcmul`) rounds once instead of twice on some machines only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peer.errors import UserError


class OuterOptimizer(Protocol):
    """(anchor, buffers, aggregate) -> anchor and buffers, in place; immutable itself: all state is in the buffers."""

    @property
    def num_buffers(self) -> int:
        """Fp32 vectors of the anchor's length that it needs, zero at genesis."""

    def step_(self, anchor: Tensor, buffers: Sequence[Tensor], aggregate: Tensor) -> None:
        """Update `anchor` and `buffers` in place on any chunk of elements; `aggregate` stays as it is.

        Args:
            anchor: fp32 [n].
            buffers: `num_buffers` times fp32 [n].
            aggregate: fp32 [n], the aggregated pseudo-gradient D.
        """


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """anchor <- anchor - lr D. With lr 1 this is federated averaging (arXiv 1602.05629)."""

    lr: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)

    @property
    def num_buffers(self) -> int:
        """None needed."""
        return 0

    def step_(self, anchor: Tensor, buffers: Sequence[Tensor], aggregate: Tensor) -> None:
        """See `OuterOptimizer.step_`."""
        assert len(buffers) == self.num_buffers
        anchor.sub_(aggregate * self.lr)


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """m <- beta m + D; anchor <- anchor - lr (D + beta m).

    The form of `torch.optim.SGD(nesterov=True)`, which DiLoCo uses (arXiv 2311.08105, algorithm 1, line 14).
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"outer_momentum={self.momentum}: must be in [0, 1)", "published: 0.9")

    @property
    def num_buffers(self) -> int:
        """One: the momentum m."""
        return 1

    def step_(self, anchor: Tensor, buffers: Sequence[Tensor], aggregate: Tensor) -> None:
        """See `OuterOptimizer.step_`."""
        (buffer,) = buffers
        buffer.mul_(self.momentum).add_(aggregate)
        anchor.sub_((buffer * self.momentum).add_(aggregate).mul_(self.lr))


def _check_lr(lr: float) -> None:
    if not (math.isfinite(lr) and lr > 0.0):
        raise UserError(f"outer_learning_rate={lr}: must be finite and above 0", "published: 0.7 with momentum 0.9")
