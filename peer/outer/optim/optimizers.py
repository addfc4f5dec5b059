"""Outer optimizers: elementwise, in place or not, with multiplications and additions kept apart.

Each operation is one IEEE rounding, so that every CPU computes the same bits, whole or in chunks. A fused
multiply-add (`alpha=`, `addcmul`) rounds once instead of twice on some machines only. Square root and division
are correctly rounded everywhere; a power or a logarithm would not be.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.numerics.kernels import Coded, kernels_for


class Vectors(NamedTuple):
    """The same elements of all vectors of an outer state, fp32 [n] each."""

    anchor: Tensor
    buffers: Sequence[Tensor]


class OuterOptimizer(Protocol):
    """(anchor, buffers, aggregate) -> anchor and buffers; immutable itself: all state is in the buffers."""

    @property
    def initial_values(self) -> tuple[float, ...]:
        """What each buffer, an fp32 vector of the anchor's length, is filled with at genesis."""

    @property
    def num_buffers(self) -> int:
        """How many buffers it needs."""
        return len(self.initial_values)

    @property
    def max_norm(self) -> float | None:
        """What aggregates are clipped to before the step; None where they are not."""
        return None

    @property
    def elementwise(self) -> bool:
        """Whether some elements can be stepped without the others."""
        return True

    def shaped(self, shapes: Sequence[tuple[int, ...]], hidden: Sequence[int] = ()) -> OuterOptimizer:  # noqa: ARG002
        """The same for a model with these parameters, in the order of the flat vector.

        Args:
            hidden: places of the matrices inside transformer blocks.
        """
        return self

    def computing_on(self, device: torch.device) -> OuterOptimizer:  # noqa: ARG002
        """The same with its large products on a device, where it has some; vectors stay in RAM, bits the same."""
        return self

    def step_(
        self,
        anchor: Tensor,
        buffers: Sequence[Tensor],
        aggregate: Tensor,
        *,
        round: int = 0,
        lr_scale: float = 1.0,
    ) -> None:
        """`step` in place: update `anchor` (fp32 [n]) and `buffers` (`num_buffers` times fp32 [n])."""
        vectors = Vectors(anchor, buffers)
        self.step(vectors, aggregate, vectors, round=round, lr_scale=lr_scale)

    def step(
        self, old: Vectors, aggregate: Tensor, new: Vectors, *, round: int = 0, lr_scale: float = 1.0, start: int = 0
    ) -> None:
        """Write the successor of `old` into `new`, on any chunk of elements; `aggregate` stays as it is.

        Args:
            old: stays as it is, but where `new` is the same memory.
            aggregate: fp32 [n], the aggregated pseudo-gradient D.
            new: memory of its own, or the very tensors of `old`; hence no vector of `old` may be read once its own
                successor is written.
            round: outer steps taken since genesis, 0 at the first; the same for every chunk of a step.
            lr_scale: factor on the learning rate, at least 0, for outer rates that follow a schedule.
            start: place of the first element in the fragment.
        """

    def step_coded(
        self, old: Vectors, aggregate: Sequence[Coded], new: Vectors, *, round: int = 0, lr_scale: float = 1.0  # noqa: ARG002
    ) -> bool:
        """`step`, of an aggregate that still lies in its payloads; False where no loop does it: nothing is written."""
        return False

    def result(self, anchor: Tensor, buffers: Sequence[Tensor], rounds: int) -> Tensor:  # noqa: ARG002
        """What a run yields after `rounds` outer steps, fp32 [n]: the parameters to evaluate and to export."""
        return anchor


@dataclass(frozen=True, kw_only=True)
class Wrapper(OuterOptimizer):
    """Another optimizer with something around it; by itself, only its properties."""

    base: OuterOptimizer

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Those of the base."""
        return self.base.initial_values

    @property
    def max_norm(self) -> float | None:
        return self.base.max_norm

    @property
    def elementwise(self) -> bool:
        return self.base.elementwise

    def shaped(self, shapes: Sequence[tuple[int, ...]], hidden: Sequence[int] = ()) -> Self:
        return replace(self, base=self.base.shaped(shapes, hidden))

    def computing_on(self, device: torch.device) -> Self:
        return replace(self, base=self.base.computing_on(device))

    def result(self, anchor: Tensor, buffers: Sequence[Tensor], rounds: int) -> Tensor:
        return self.base.result(anchor, buffers, rounds)


@dataclass(frozen=True)
class Step:
    """What one step knows beside the state.

    Attributes:
        round: outer steps taken since genesis.
        start: place of the first element in the fragment.
    """

    lr: float
    round: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Descent(OuterOptimizer):
    """What optimizers with a learning rate have in common.

    Attributes:
        lr: the learning rate, finite and above 0.
    """

    lr: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0.0):
            raise UserError(
                f"outer_learning_rate={self.lr}: must be finite and above 0", "published: 0.7 with momentum 0.9"
            )

    def step(
        self, old: Vectors, aggregate: Tensor, new: Vectors, *, round: int = 0, lr_scale: float = 1.0, start: int = 0
    ) -> None:
        assert len(old.buffers) == self.num_buffers, f"{len(old.buffers)} buffers instead of {self.num_buffers}"
        assert 0.0 <= lr_scale < math.inf, f"lr_scale={lr_scale}"
        self._descend(old, aggregate, new, Step(self.lr * lr_scale, round, start))  # times 1 is lr, bit for bit

    @abstractmethod
    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        """`step`, with what it knows in one piece."""


@dataclass(frozen=True, kw_only=True)
class Sgd(Descent):
    """anchor <- anchor - lr D. With lr 1 this is federated averaging (arXiv 1602.05629)."""

    @property
    def initial_values(self) -> tuple[float, ...]:
        """No buffers."""
        return ()

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        torch.sub(old.anchor, aggregate * step.lr, out=new.anchor)


@dataclass(frozen=True, kw_only=True)
class Momentum(Descent):
    """A descent with one buffer: the momentum m <- beta m + D."""

    momentum: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momentum(self.momentum)

    @property
    def initial_values(self) -> tuple[float, ...]:
        """One buffer: the momentum m."""
        return (0.0,)


@dataclass(frozen=True, kw_only=True)
class Nesterov(Momentum):
    """m <- beta m + D; anchor <- anchor - lr (beta m + D).

    The form of `torch.optim.SGD(nesterov=True)`, which DiLoCo uses (arXiv 2311.08105, algorithm 1, line 14).
    """

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        before, after = (old.anchor, old.buffers[0]), (new.anchor, new.buffers[0])
        if kernels := kernels_for(*before, aggregate, *after):
            kernels.nesterov(before, aggregate, self.momentum, step.lr, after)
            return
        momentum = torch.mul(old.buffers[0], self.momentum, out=new.buffers[0]).add_(aggregate)
        torch.sub(old.anchor, (momentum * self.momentum).add_(aggregate).mul_(step.lr), out=new.anchor)

    def step_coded(
        self, old: Vectors, aggregate: Sequence[Coded], new: Vectors, *, round: int = 0, lr_scale: float = 1.0  # noqa: ARG002
    ) -> bool:
        before, after = (old.anchor, old.buffers[0]), (new.anchor, new.buffers[0])
        kernels = kernels_for(*before, *after)
        if kernels is not None:
            kernels.nesterov_coded(before, aggregate, self.momentum, self.lr * lr_scale, after)
        return kernels is not None


@dataclass(frozen=True, kw_only=True)
class HeavyBall(Momentum):
    """m <- beta m + D; anchor <- anchor - lr m (Polyak 1964): Nesterov without the look ahead."""

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        momentum = torch.mul(old.buffers[0], self.momentum, out=new.buffers[0]).add_(aggregate)
        torch.sub(old.anchor, momentum * step.lr, out=new.anchor)


@dataclass(frozen=True, kw_only=True)
class SignSgd(Descent):
    """anchor <- (1 - lr wd) anchor - lr sign(D), sign(0) = 0 (DeMo, arXiv 2411.19870, algorithm 1).

    Decay first, as in DeMo's code. The size of D plays no part.
    """

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.weight_decay * self.lr < 1.0:
            raise UserError(
                f"outer_weight_decay={self.weight_decay}: must be in [0, 1 / outer_learning_rate = {1.0 / self.lr:g})",
                "published: 0 (DeMo), 0.1 (DisTrO)",
            )

    @property
    def initial_values(self) -> tuple[float, ...]:
        """No buffers."""
        return ()

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        decayed = torch.mul(old.anchor, 1.0 - step.lr * self.weight_decay, out=new.anchor)
        decayed.sub_(aggregate.sign().mul_(step.lr))


@dataclass(frozen=True, kw_only=True)
class DelayedNesterov(Descent):
    """Momentum at every N-th step only: stale pseudo-gradients would compound in it (arXiv 2401.09135, algorithm 3).

    With s the sum of D since the last momentum step and N = `every`, and the paper's momentum activation c = 0:

        s <- s + D
        if (round + 1) mod N == 0:  m <- beta m + s / N;  anchor <- anchor - lr (D / N + beta m);  s <- 0
        otherwise:                  anchor <- anchor - lr D / N

    N steps move the anchor as far as one Nesterov step with the mean of their D would; with N = 1 this is `Nesterov`.
    The paper sets N to the number of workers, each D being that of one worker.
    """

    momentum: float
    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momentum(self.momentum)
        if self.every < 1:
            raise UserError(f"outer_every={self.every}: must be at least 1", "published: the number of peers")

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Two buffers: the momentum m and the sum s."""
        return (0.0, 0.0)

    def _descend(self, old: Vectors, aggregate: Tensor, new: Vectors, step: Step) -> None:
        momentum, total = new.buffers
        torch.add(old.buffers[1], aggregate, out=total)
        share = aggregate / self.every
        if (step.round + 1) % self.every == 0:
            torch.mul(old.buffers[0], self.momentum, out=momentum).add_(total / self.every)
            share = (momentum * self.momentum).add_(share)
            total.zero_()
        else:
            momentum.copy_(old.buffers[0])
        torch.sub(old.anchor, share.mul_(step.lr), out=new.anchor)


def _check_momentum(momentum: float) -> None:
    if not 0.0 <= momentum < 1.0:
        raise UserError(f"outer_momentum={momentum}: must be in [0, 1)", "published: 0.9")
