"""EDiT's pseudo-gradient penalty: what moved far counts little (Cheng et al. 2024, arXiv 2412.07210)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from torch import Tensor

from peer.errors import UserError
from peer.outer.aggregate.base import PerTensor, scaled_sum
from peer.outer.aggregate.robust import check_at_least
from peer.outer.numerics.ordered_sums import norm

_HALVINGS: Final = 10
_TERMS: Final = 14
_NOTHING: Final = 700.0  # exp of minus this is as good as 0


@dataclass(frozen=True, kw_only=True)
class Penalised(PerTensor):
    """Per tensor, a mean by weights w_i exp(-|x_i| / temperature); then the whole is clipped to `max_norm`.

    A contribution longer than `threshold` times the median does not count. The paper compares it with what the same
    worker sent before; an aggregator remembers nothing, and compares it with the others.

    Attributes:
        temperature: in the units of norms; the larger, the more the weights are w_i.
    """

    threshold: float = 3.0
    temperature: float = 1.0
    max_norm: float = 10.0

    def __post_init__(self) -> None:
        check_at_least("threshold", self.threshold, 1.0)
        for name in ("temperature", "max_norm"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"{name}={getattr(self, name)}: must be above 0", "published: 1 and 10")

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        mean = super().aggregate(contributions, weights)
        factor = self.max_norm / (norm(mean) + 1e-6)
        return mean.mul_(factor) if factor < 1.0 else mean

    def _of(self, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        norms = [norm(tensor) for tensor in tensors]
        limit, least = self.threshold * median(norms), min(norms)
        kept = [place for place, length in enumerate(norms) if length <= limit]
        factors = [shares[place] * fading((norms[place] - least) / self.temperature) for place in kept]
        return scaled_sum([tensors[place] for place in kept], [factor / sum(factors) for factor in factors])


def fading(x: float) -> float:
    """exp(-x) of x >= 0 to 1e-12, the same bits on every machine: a library's own may differ by the last."""
    if x > _NOTHING:
        return 0.0
    small, grown = x / 2**_HALVINGS, 1.0
    for term in range(_TERMS, 0, -1):
        grown = 1.0 + small / term * grown
    for _ in range(_HALVINGS):
        grown *= grown
    return 1.0 / grown
