"""An outer optimizer whose rate, momentum and memory follow the course of a run: functions of the number of the round.

Every peer knows that number, so a schedule costs no byte, and an audit or a newcomer that replays rounds needs no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.numerics.kernels import Coded
from peer.outer.optim.optimizers import Descent, Vectors, Wrapper


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What changes when. Shares are of the run: after round number k of N, k / N of it is over.

    Attributes:
        lazy: the share at first in which a round takes the plain mean, while the momentum gathers what it sees.
        warmup: the share after that in which the rate grows from 0 to its own, by as much in every round.
        momenta: in the place of the optimizer's own momentum, each for an equal part of the share `momenta_for`.
        momenta_for: begins where `lazy` ends.
        decay_from, decay_until: shares between which the rate goes straight to `final_lr`; equal: at once.
        final_lr: None keeps the rate.
        restart: every so many rounds, the optimizer forgets its momentum and its moments; 0 never.
        rounds: N; the run fills it in.
    """

    lazy: float = 0.0
    warmup: float = 0.0
    momenta: tuple[float, ...] = ()
    momenta_for: float = 0.0
    decay_from: float = 1.0
    decay_until: float = 1.0
    final_lr: float | None = None
    restart: int = 0
    rounds: int | None = field(default=None, metadata={"bound": True})

    def __post_init__(self) -> None:
        shares = ("lazy", "warmup", "momenta_for", "decay_from", "decay_until")
        for name in shares:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1]", "it is a share of the run's rounds")
        if self.decay_from > self.decay_until:
            raise UserError(
                f"decay_from={self.decay_from}: must be at most decay_until={self.decay_until}", "1 is the end of a run"
            )
        if self.final_lr is not None and not (math.isfinite(self.final_lr) and self.final_lr > 0.0):
            raise UserError(f"final_lr={self.final_lr}: must be finite and above 0", "leave it out to keep the rate")
        if not all(isinstance(one, float | int) and 0.0 <= one < 1.0 for one in self.momenta):
            raise UserError(f"momenta={list(self.momenta)}: each must be in [0, 1)", "published: [0.99, 0.95]")
        if self.restart < 0:
            raise UserError(f"restart={self.restart}: must be at least 0", "published: 3; 0 never restarts")

    @property
    def needs_end(self) -> bool:
        """Whether anything follows the share of the run that is over."""
        return replace(self, restart=0, rounds=None) != Stages()

    def over(self, round: int) -> float:
        """The share that is over with the round that follows `round` others."""
        return min(1.0, (round + 1) / self.rounds) if self.rounds else 1.0

    def is_lazy(self, round: int) -> bool:
        """Whether that round takes the plain mean."""
        return 0.0 < self.over(round) <= self.lazy

    def restarts(self, round: int) -> bool:
        """Whether the optimizer forgets before that round."""
        return self.restart > 0 and round > 0 and round % self.restart == 0

    def at(self, base: Descent, round: int) -> Descent:
        """The optimizer with the rate and the momentum of that round."""
        over, lr = self.over(round), base.lr
        if self.lazy < over < self.lazy + self.warmup:
            lr *= (over - self.lazy) / self.warmup
        if self.final_lr is not None and over > self.decay_from:
            last = over >= self.decay_until
            part = 1.0 if last else (over - self.decay_from) / (self.decay_until - self.decay_from)
            lr = self.final_lr if last else lr + part * (self.final_lr - lr)
        now, since = replace(base, lr=lr), over - self.lazy
        if self.momenta and 0.0 < since <= self.momenta_for:
            part = math.ceil(since / self.momenta_for * len(self.momenta))
            changed: dict[str, Any] = {"momentum": self.momenta[min(part, len(self.momenta)) - 1]}
            return replace(now, **changed)
        return now


@dataclass(frozen=True, kw_only=True)
class Scheduled(Wrapper):
    """Another optimizer in stages."""

    base: Descent
    stages: Stages

    def step(
        self, old: Vectors, aggregate: Tensor, new: Vectors, *, round: int = 0, lr_scale: float = 1.0, start: int = 0
    ) -> None:
        if self.stages.restarts(round):
            fresh = zip(old.buffers, self.initial_values, strict=True)
            old = Vectors(old.anchor, [torch.full_like(buffer, value) for buffer, value in fresh])
        mean = old.anchor - aggregate if self.stages.is_lazy(round) else None
        now = self.stages.at(self.base, round)
        now.step(old, aggregate, new, round=round, lr_scale=lr_scale, start=start)
        if mean is not None:
            new.anchor.copy_(mean)

    def step_coded(
        self, old: Vectors, aggregate: Sequence[Coded], new: Vectors, *, round: int = 0, lr_scale: float = 1.0
    ) -> bool:
        if self.stages.restarts(round) or self.stages.is_lazy(round):
            return False
        return self.stages.at(self.base, round).step_coded(old, aggregate, new, round=round, lr_scale=lr_scale)
