"""Adaptive outer optimizers: Adagrad, Adam and Yogi on the server (FedOpt, Reddi et al. 2021, arXiv 2003.00295).

Algorithm 2 there, whose Delta is -D; the momentum m is kept with D's sign, so that the two signs cancel:

    m <- beta1 m + (1 - beta1) D;  v by the optimizer's own rule;  anchor <- anchor - lr m / (sqrt(v) + tau)

No bias correction. v starts at tau^2 unless `initial_v` says otherwise. The rules of `peer.outer.optim.optimizers`
hold: elementwise, in place or not, each operation rounded on its own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.optim.optimizers import Descent, Step, Vectors

_LARGEST_FP32: Final = (2.0 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, kw_only=True)
class Adagrad(Descent):
    """v <- v + D^2; anchor <- anchor - lr D / (sqrt(v) + tau): FedAdagrad, without momentum as in the experiments."""

    lr: float = 0.1
    tau: float = 1e-3
    initial_v: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_denominator(self.tau, self.initial_v, v_never_shrinks=True)

    @property
    def initial_values(self) -> tuple[float, ...]:
        """One buffer: v."""
        return (_initial_v(self.tau, self.initial_v),)

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        v = torch.add(old.buffers[0], aggregate * aggregate, out=new.buffers[0])
        torch.sub(old.anchor, _movement(aggregate, v, step.lr, self.tau), out=new.anchor)


@dataclass(frozen=True, kw_only=True)
class _Moments(Descent):
    """m <- beta1 m + (1 - beta1) D, with a rule for v."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    initial_v: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self.betas)
        _check_denominator(self.tau, self.initial_v, v_never_shrinks=self.betas[1] == 1.0)

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Two buffers: m and v."""
        return (0.0, _initial_v(self.tau, self.initial_v))

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        m, v = new.buffers
        beta1, _ = self.betas
        torch.mul(old.buffers[0], beta1, out=m).add_(aggregate * (1.0 - beta1))
        self._renew(old.buffers[1], aggregate * aggregate, v)
        torch.sub(old.anchor, _movement(m, v, step.lr, self.tau), out=new.anchor)

    @abstractmethod
    def _renew(self, v: Tensor, square: Tensor, out: Tensor) -> None:
        """What D^2, which may be overwritten, makes of `v`, into `out`, which may be `v` itself."""


@dataclass(frozen=True, kw_only=True)
class Adam(_Moments):
    """v <- beta2 v + (1 - beta2) D^2: FedAdam. With betas (0, 1), initial_v 1 and tau 0 it is `Sgd`."""

    def _renew(self, v: Tensor, square: Tensor, out: Tensor) -> None:
        _, beta2 = self.betas
        torch.mul(v, beta2, out=out).add_(square.mul_(1.0 - beta2))


@dataclass(frozen=True, kw_only=True)
class Yogi(_Moments):
    """v <- v - (1 - beta2) D^2 sign(v - D^2): FedYogi, whose v forgets a large D no faster than it learnt it."""

    lr: float = 0.01

    def _renew(self, v: Tensor, square: Tensor, out: Tensor) -> None:
        _, beta2 = self.betas
        torch.sub(v, (v - square).sign_().mul_(square).mul_(1.0 - beta2), out=out)


def _movement(m: Tensor, v: Tensor, lr: float, tau: float) -> Tensor:
    return (m * lr).div_(v.sqrt().add_(tau))


def _initial_v(tau: float, initial_v: float | None) -> float:
    return tau * tau if initial_v is None else initial_v


def _check_betas(betas: tuple[float, float]) -> None:
    beta1, beta2 = betas
    if not 0.0 <= beta1 < 1.0:
        raise UserError(f"outer_betas={betas}: the first must be in [0, 1)", "published: 0.9")
    if not 0.0 <= beta2 <= 1.0:
        raise UserError(f"outer_betas={betas}: the second must be in [0, 1]", "published: 0.99")


def _check_denominator(tau: float, initial_v: float | None, *, v_never_shrinks: bool) -> None:
    """`v_never_shrinks`: v can never shrink, so that a positive start keeps the denominator above 0 on its own."""
    if not (math.isfinite(tau) and tau >= 0.0):
        raise UserError(f"outer_tau={tau}: must be finite and at least 0", "published: 0.001")
    if initial_v is not None and not 0.0 <= initial_v <= _LARGEST_FP32:
        raise UserError(f"outer_initial_v={initial_v}: must be in [0, 3.4e38]", "leave it out for tau squared")
    if tau == 0.0 and not (v_never_shrinks and initial_v):
        raise UserError("outer_tau=0.0: must be above 0, or 0 / 0 would appear where D is 0", "published: 0.001")

