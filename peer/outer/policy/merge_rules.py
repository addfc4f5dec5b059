"""How a trainer takes up the result of a round: rules in place, on flat fp32 vectors, by separate operations."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from peer.errors import UserError
from peer.outer.state.carry import carry_progress_
from peer.outer.state.outer_state import CHUNK, chunks


class MergeRule(ABC):
    """(local, snapshot, old anchor, new anchor) -> local.

    Attributes:
        reads_snapshot: it needs the parameters at the snapshot, where steps were made since.
        reads_old_anchor: it needs the anchor before the round.
        kept_rounds: so many rounds in a row without this peer leave its parameters as they are.
        eager: every peer adds its own share of a round to the anchor before the round is over.
        second_iterate: parameters are mixed with a second iterate between rounds (A2CiD2).
        carries: local <- anchor_new + (local - base), which a device can do by itself.
    """

    reads_snapshot: ClassVar[bool] = False
    reads_old_anchor: ClassVar[bool] = False
    eager: ClassVar[bool] = False
    second_iterate: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    kept_rounds: int = 0

    @abstractmethod
    def merge_(self, local: Tensor, base: Tensor | None, anchor_old: Tensor, anchor_new: Tensor) -> None:
        """Change `local` in place; the others stay as they are.

        Args:
            local: fp32 [n], the trainer's parameters now.
            base: fp32 [n], its parameters at the snapshot that the round was made from; None if no step was made since,
                so that they equal `local`.
            anchor_old: fp32 [n], the anchor before the round.
            anchor_new: fp32 [n], the anchor after it.
        """


@dataclass(frozen=True, kw_only=True)
class Mix(MergeRule):
    """local <- alpha local + (1 - alpha) anchor_new (streaming DiLoCo, arXiv 2501.18512; PAPA, arXiv 2304.03094).

    Attributes:
        alpha: 0 takes the anchor and 1 keeps the local parameters, both bit for bit. 1 means NO communication.
    """

    alpha: float

    def __post_init__(self) -> None:
        _check_fraction("alpha", self.alpha, "0 takes the anchor; published: 0 or 0.5 (streaming), 0.99 (PAPA)")

    def merge_(self, local: Tensor, base: Tensor | None, anchor_old: Tensor, anchor_new: Tensor) -> None:  # noqa: ARG002
        if self.alpha == 0.0:
            local.copy_(anchor_new)
        elif self.alpha < 1.0:
            for start, stop in chunks(local.numel(), CHUNK):
                local[start:stop].mul_(self.alpha).add_(anchor_new[start:stop] * (1.0 - self.alpha))


@dataclass(frozen=True, kw_only=True)
class Carry(MergeRule):
    """local <- anchor_new + (local - base): the anchor plus the progress that no round has carried yet."""

    reads_snapshot: ClassVar[bool] = True
    carries: ClassVar[bool] = True

    def merge_(self, local: Tensor, base: Tensor | None, anchor_old: Tensor, anchor_new: Tensor) -> None:  # noqa: ARG002
        if base is None:
            local.copy_(anchor_new)
        else:
            carry_progress_(local, base, anchor_new)


@dataclass(frozen=True, kw_only=True)
class Keep(Carry):
    """`Carry`, but a round without this peer leaves its parameters as they are: it brings them to a later round.

    After more than `kept_rounds` of them it starts from the anchor, with its own progress on top.
    """

    kept_rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class Elastic(MergeRule):
    """local <- local - a (x - anchor_old), with x = base, or local if base is None (EASGD, arXiv 1412.6651).

    The old centre and the snapshot: so it is the very d_i that the round added to the centre, and sum_i x_i + c is
    kept even where steps were made meanwhile.

    Attributes:
        a: eta rho; with R peers beta = R a should be at most 1 (published: .9). 0 keeps the local parameters.
    """

    reads_snapshot: ClassVar[bool] = True
    reads_old_anchor: ClassVar[bool] = True
    a: float

    def __post_init__(self) -> None:
        _check_fraction("a", self.a, "published: 0.9 divided by the number of peers")

    def merge_(self, local: Tensor, base: Tensor | None, anchor_old: Tensor, anchor_new: Tensor) -> None:  # noqa: ARG002
        if self.a == 0.0:
            return
        sent = local if base is None else base
        for start, stop in chunks(local.numel(), CHUNK):
            local[start:stop].sub_((sent[start:stop] - anchor_old[start:stop]).mul_(self.a))


@dataclass(frozen=True, kw_only=True)
class Eager(MergeRule):
    """local <- local + (anchor_new - anchor_old); a peer holds its own share early (arXiv 2502.12996, algorithm 2).

    It sends its part a whole round before it is applied; see `peer.outer.state.own_part`.
    """

    reads_old_anchor: ClassVar[bool] = True
    eager: ClassVar[bool] = True

    def merge_(self, local: Tensor, base: Tensor | None, anchor_old: Tensor, anchor_new: Tensor) -> None:  # noqa: ARG002
        carry_progress_(local, anchor_old, anchor_new)


@dataclass(frozen=True, kw_only=True)
class Accelerated(MergeRule):
    """The continuous momentum of A2CiD2 between pair events (arXiv 2306.08289); 0 eta is plain gossip.

    Attributes:
        eta: of the mixing between the two iterates; None takes it from the graph.
        alpha_tilde: of the pair event; None takes it from the graph.
    """

    second_iterate: ClassVar[bool] = True
    eta: float | None = None
    alpha_tilde: float | None = None

    def __post_init__(self) -> None:
        for name in ("eta", "alpha_tilde"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise UserError(f"{name}={value}: must be finite and at least 0", "leave it out: the graph gives it")

    def merge_(self, local: Tensor, base: Tensor | None, anchor_old: Tensor, anchor_new: Tensor) -> None:
        """Nothing: `peer.outer.state.gossip_mixing.pair_` changes both iterates at the event itself."""


def _check_fraction(name: str, value: float, hint: str) -> None:
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise UserError(f"{name}={value}: must be in [0, 1]", hint)
