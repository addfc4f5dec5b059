"""What is kept in a buffer beside another outer optimizer: the average of anchors, the second iterate of A2CiD2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.optim.optimizers import OuterOptimizer, Vectors, Wrapper


@dataclass(frozen=True, kw_only=True)
class Averaged(Wrapper):
    """Another optimizer, and an average of its anchors beside: a <- decay a + (1 - decay) anchor.

    Peers start every round from the anchor as ever; the average, a / (1 - decay^rounds), is what the run yields. It
    smooths out what momentum and noise move back and forth in each round (Polyak and Juditsky 1992; latest weights:
    Kaddour 2022, arXiv 2209.14981), and costs one buffer and no byte.

    Attributes:
        decay: of the average, per round; .8 remembers about five rounds.
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise UserError(f"average={self.decay}: must be in (0, 1)", "0.8 remembers about five rounds")

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Those of the base, and the average."""
        return (*self.base.initial_values, 0.0)

    def step(
        self, old: Vectors, aggregate: Tensor, new: Vectors, *, round: int = 0, lr_scale: float = 1.0, start: int = 0
    ) -> None:
        (*before, average), (*after, renewed) = old.buffers, new.buffers
        base_old, base_new = Vectors(old.anchor, before), Vectors(new.anchor, after)
        self.base.step(base_old, aggregate, base_new, round=round, lr_scale=lr_scale, start=start)
        torch.mul(average, self.decay, out=renewed).add_(new.anchor * (1.0 - self.decay))

    def result(self, anchor: Tensor, buffers: Sequence[Tensor], rounds: int) -> Tensor:
        """See `OuterOptimizer.result`; at genesis the anchor."""
        return anchor if rounds == 0 else buffers[-1] / (1.0 - self.decay**rounds)


@dataclass(frozen=True, kw_only=True)
class PrimalAveraged(Wrapper):
    """The average takes part: peers start from a point between it and what the other optimizer moves.

        z <- the other optimizer's step from z;  x <- decay x + (1 - decay) z
        anchor <- interpolation x + (1 - interpolation) z;  the run yields x

    Generalised primal averaging (Defazio et al. 2025, arXiv 2512.17131), which gives `decay` as mu_x, and
    `interpolation` as mu_y. The buffer holds x - z, from which both follow.
    """

    decay: float
    interpolation: float

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Those of the base, and no distance."""
        return (*self.base.initial_values, 0.0)

    def step(
        self, old: Vectors, aggregate: Tensor, new: Vectors, *, round: int = 0, lr_scale: float = 1.0, start: int = 0
    ) -> None:
        (*before, ahead), (*after, renewed) = old.buffers, new.buffers
        z = old.anchor - ahead * self.interpolation
        moved = Vectors(torch.empty_like(z), after)
        self.base.step(Vectors(z, before), aggregate, moved, round=round, lr_scale=lr_scale, start=start)
        torch.add(ahead, z.sub_(moved.anchor), out=renewed).mul_(self.decay)
        torch.add(moved.anchor, renewed * self.interpolation, out=new.anchor)

    def result(self, anchor: Tensor, buffers: Sequence[Tensor], rounds: int) -> Tensor:  # noqa: ARG002
        """See `OuterOptimizer.result`."""
        return anchor + buffers[-1] * (1.0 - self.interpolation)


@dataclass(frozen=True)
class WithSecond(OuterOptimizer):
    """Another optimizer, with one more buffer that it leaves alone: how far the second iterate of A2CiD2 is ahead."""

    base: OuterOptimizer

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Those of the base, and a difference of zero."""
        return (*self.base.initial_values, 0.0)

    def step(self, *_: Any, **__: Any) -> None:
        raise AssertionError("peers that mix parameters make no outer step")
