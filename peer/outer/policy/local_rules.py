"""What a recipe adds to the inner loop: in place, on flat fp32 vectors of any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final

from torch import Tensor

from peer.errors import UserError
from peer.outer.state.outer_state import CHUNK, chunks

MOST_DRAWN: Final = 0.9  # of the draws that move a model towards its anchor

GradientAt = Callable[[Tensor], Tensor]
"""Parameters [P] -> gradient [P] there, on the batch of the present step."""


class LocalRule:
    """Acts between the backward pass and the inner optimizer, and after the latter. By itself, it changes nothing.

    Order: `begin_round` when a new anchor was merged; then per step backward, `on_gradient`, inner optimizer,
    `after_step`.

    Attributes:
        replays: whether `on_gradient` needs `gradient_at`: a second forward and backward pass per step.
        reads_anchor: whether it reads the anchor at every step, where the model computes.
        device_vectors, ram_vectors: fp32 [P] that a trainer keeps for it there and in RAM, without the anchor.
    """

    replays: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = False
    device_vectors: ClassVar[int] = 0
    ram_vectors: ClassVar[int] = 0

    @property
    def kept(self) -> float:
        """The share of what would have been contributed from the previous anchor that is subtracted."""
        return 0.0

    def begin_round(self) -> None:
        """Forget what belongs to the round before."""

    def on_gradient(
        self, gradient: Tensor, local: Tensor, anchor: Tensor, gradient_at: GradientAt | None = None
    ) -> None:
        """Change the gradient before the inner optimizer sees it.

        Args:
            gradient: fp32 [P], of the present batch at `local`; changed in place.
            local: fp32 [P], the parameters before the step; left unchanged.
            anchor: fp32 [P], the anchor of the round; left unchanged.
            gradient_at: for rules with `replays`; may change nothing that the caller keeps.
        """

    def times(self, draws: Random) -> int:  # noqa: ARG002
        """How often `after_step` is called after the present step.

        Args:
            draws: alike on all devices of a peer.
        """
        return 1

    def after_step(self, local: Tensor, anchor: Tensor, lr: float) -> None:
        """Change the parameters after the inner optimizer's step.

        Args:
            local: fp32 [P], the parameters after the step; changed in place.
            anchor: fp32 [P]; left unchanged.
        """


@dataclass(frozen=True, kw_only=True)
class Plain(LocalRule):
    """Nothing is added."""


@dataclass(frozen=True, kw_only=True)
class Proximal(LocalRule):
    """gradient += mu (x - anchor): the gradient of mu/2 |x - anchor|^2 (FedProx, arXiv 1812.06127, equation 2).

    Attributes:
        mu: 0 changes nothing, bit for bit; published: 0.001 to 1.
        decoupled: pull after the step instead, x -= lr mu (x - anchor), past the optimizer's preconditioner (as AdamW
            does with weight decay); under plain SGD the same to first order in lr.
    """

    reads_anchor: ClassVar[bool] = True
    mu: float
    decoupled: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0.0):
            raise UserError(f"mu={self.mu}: must be finite and at least 0", "published: 0.001, 0.01, 0.1 or 1")

    def on_gradient(
        self,
        gradient: Tensor,
        local: Tensor,
        anchor: Tensor,
        gradient_at: GradientAt | None = None,  # noqa: ARG002
    ) -> None:
        if self.mu == 0.0 or self.decoupled:
            return
        for start, stop in chunks(local.numel(), CHUNK):
            gradient[start:stop].add_((local[start:stop] - anchor[start:stop]).mul_(self.mu))

    def after_step(self, local: Tensor, anchor: Tensor, lr: float) -> None:
        if self.mu == 0.0 or not self.decoupled:
            return
        for start, stop in chunks(local.numel(), CHUNK):
            local[start:stop].sub_((local[start:stop] - anchor[start:stop]).mul_(lr * self.mu))


@dataclass(frozen=True, kw_only=True)
class PseudoSync(LocalRule):
    """x <- x - (lr eta / p) (x - anchor) at a step in which a draw falls below p, in the place of a gradient's step.

    PALSGD (arXiv 2504.18454). Its lr is (1 - p) of the one that its gradients' steps take, which is the lr here; and a
    step here is one with a gradient, so that the draws between two such steps follow the first. On average this is
    `Proximal` with mu = eta, decoupled.

    Attributes:
        p: 0 changes nothing.
        eta: published: 0.5 or 1.
    """

    reads_anchor: ClassVar[bool] = True
    p: float
    eta: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= MOST_DRAWN:  # p / (1 - p) further draws follow a step on average
            raise UserError(f"p={self.p}: must be in [0, {MOST_DRAWN}]", "published: 0.2")
        if not (math.isfinite(self.eta) and self.eta >= 0.0):
            raise UserError(f"eta={self.eta}: must be finite and at least 0", "published: 0.5 or 1")

    def times(self, draws: Random) -> int:
        count = 0
        while draws.random() < self.p:
            count += 1
        return count

    def after_step(self, local: Tensor, anchor: Tensor, lr: float) -> None:
        pull = lr * (1.0 - self.p) * self.eta / self.p
        for start, stop in chunks(local.numel(), CHUNK):
            local[start:stop].sub_((local[start:stop] - anchor[start:stop]).mul_(pull))


class Spider(LocalRule):
    """v_k = g(w_k) + (v_{k-1} - g(w_{k-1})), both gradients on the same batch (FedGLOMO, arXiv 2012.04061).

    v_0 = g(w_0). The inner optimizer gets v_k in place of g(w_k). Keeps two fp32 [P] on the gradient's device, and
    costs a second gradient per step.
    """

    replays: ClassVar[bool] = True

    def __init__(self) -> None:
        self._previous: Tensor | None = None
        self._estimate: Tensor | None = None

    def begin_round(self) -> None:
        """The next step starts from v_0 again."""
        self._previous = self._estimate = None

    def on_gradient(
        self,
        gradient: Tensor,
        local: Tensor,
        anchor: Tensor,  # noqa: ARG002
        gradient_at: GradientAt | None = None,
    ) -> None:
        assert gradient_at is not None, "Spider needs gradient_at"
        if self._previous is None or self._estimate is None:
            self._previous, self._estimate = local.clone(), gradient.clone()
            return
        gradient.add_(self._estimate.sub_(gradient_at(self._previous)))
        self._estimate.copy_(gradient)
        self._previous.copy_(local)


@dataclass(frozen=True, kw_only=True)
class Replay(LocalRule):
    """FedGLOMO's peers (arXiv 2012.04061): `Spider` steps, made again from the previous anchor on the same batches.

    The contribution is D_new - (1 - beta) D_old; with the outer optimizer `HeavyBall(lr=1, momentum=1 - beta)` that is
    u <- beta D_new + (1 - beta) (u + D_new - D_old). Each trajectory has a `Spider` of its own.

    Attributes:
        beta: of the server's momentum; 1 is federated averaging.
    """

    replays: ClassVar[bool] = True
    device_vectors: ClassVar[int] = 10  # second parameters, two moments, two `Spider`s; three while one replays
    ram_vectors: ClassVar[int] = 3  # the previous anchor, and both trajectories at the snapshot
    beta: float = 0.5

    @property
    def kept(self) -> float:
        return 1.0 - self.beta

    def __post_init__(self) -> None:
        if not 0.0 < self.beta <= 1.0:
            raise UserError(f"beta={self.beta}: must be in (0, 1]", "1 has no server momentum")
