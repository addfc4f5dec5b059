"""Contributions and weights -> one vector.

Elementwise work is fp32 with one rounding an operation; sums over elements are float64, in an order that does not
depend on threads or vector width. So every CPU computes the same bits, and an auditor can recompute a shard exactly.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal, Protocol, Self

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.numerics.kernels import add_scaled
from peer.outer.numerics.ordered_sums import chunks, norm

Reasons = Mapping[int, str]
BOUND: Final = {"bound": True}  # metadata of a field that the round fills in, not the manifest


class Aggregator(Protocol):
    """Pure: holds settings and no state.

    Attributes:
        separable: whether element k of the result depends on element k of the contributions alone. Then any cut into
            chunks gives the same bits as the whole. Otherwise it must see each slice whole.
        drops_malformed: whether it drops a contribution that holds NaN, so that one sender does not end the round.
        robust: whether it limits what a malicious contribution can do.
    """

    separable: ClassVar[bool]
    drops_malformed: ClassVar[bool] = False
    robust: ClassVar[bool] = False

    def bind(self, members: int) -> Aggregator:  # noqa: ARG002
        """The same for a round of so many members."""
        return self

    def shaped(self, shapes: Sequence[Sequence[int]]) -> Aggregator:  # noqa: ARG002
        """The same for vectors of tensors of these shapes, one after the other."""
        return self

    def factors(self, weights: Sequence[float]) -> list[float] | None:  # noqa: ARG002
        """What contributions of these weights are multiplied with, if the result is their sum in order; else None.

        Raises:
            ValueError: see `aggregate`.
        """
        return None

    def judged(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> tuple[Tensor, Reasons]:
        """`aggregate`, and why each contribution that is not in it was dropped, by its index."""
        return self.aggregate(contributions, weights), {}

    @abstractmethod
    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """One vector for many.

        Args:
            contributions: fp32 [n] each, finite, at least one, in roster order; left unchanged.
            weights: one per contribution, in any common unit (token counts).

        Returns:
            A new fp32 [n].

        Raises:
            ValueError: no contributions, differing shapes or counts, or a weight that is not finite and above 0.
        """


def weighted_mean(contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i (w_i / sum w) x_i, added in the given order (McMahan et al. 2017, arXiv 1602.05629, algorithm 1).

    Args:
        contributions: fp32 [n] each, at least one; left unchanged.
        weights: one per contribution, in any common unit (token counts); normalised in float64, then cast to fp32.

    Returns:
        A new fp32 [n]. The mean of one contribution is that contribution, bit for bit.

    Raises:
        ValueError: no contributions, differing shapes or counts, or a weight that is not finite and above 0.
    """
    total = check_contributions(contributions, weights)
    return scaled_sum(contributions, [weight / total for weight in weights])


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The mean, by what its recipe divides by.

    Attributes:
        normalise: 'weights': `weighted_mean`; 'contributors': equal weights over the contributions present;
            'members': divided by a fixed count, so that a missing contribution counts as zero (SparseLoCo's R,
            arXiv 2508.15706).
        members: that count, for 'members'; the round fills it in.
    """

    separable: ClassVar[bool] = True
    normalise: Literal["weights", "contributors", "members"] = "weights"
    members: int | None = field(default=None, metadata=BOUND)

    def __post_init__(self) -> None:
        if self.normalise not in ("weights", "contributors", "members"):
            raise UserError(f"normalise={self.normalise!r}: must be 'weights', 'contributors' or 'members'")

    def bind(self, members: int) -> Mean:
        """The same with `members` filled in."""
        return replace(self, members=members)

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`; ValueError also for fewer members than contributions."""
        check_contributions(contributions, weights)
        return scaled_sum(contributions, self.factors(weights))

    def factors(self, weights: Sequence[float]) -> list[float]:
        """See `Aggregator.factors`; ValueError also for more weights than members."""
        total, count = check_weights(weights), len(weights)
        if self.normalise == "weights":
            return [weight / total for weight in weights]
        if self.normalise == "contributors":
            return [1.0 / count] * count
        if self.members is None or self.members < count:
            raise ValueError(f"{count} contributions from {self.members} members: must not be more")
        return [1.0 / self.members] * count


@dataclass(frozen=True, kw_only=True)
class PerTensor(Aggregator):
    """Aggregates each tensor by itself, and the segments of a tensor that slices cut as tensors.

    Not chunk-separable: it needs each tensor whole.

    Attributes:
        sizes: elements of each tensor, in order; none: all elements are one tensor. `shaped` fills it in.
    """

    separable: ClassVar[bool] = False
    sizes: tuple[int, ...] = field(default=(), metadata=BOUND)

    def shaped(self, shapes: Sequence[Sequence[int]]) -> Self:
        return replace(self, sizes=tuple(size for shape in shapes if (size := math.prod(shape))))

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`; ValueError also for contributions of another length than `sizes`."""
        total = check_contributions(contributions, weights)
        numel = contributions[0].numel()
        sizes = self.sizes or (numel,)
        if sum(sizes) != numel:
            raise ValueError(f"contributions of {numel} elements, the tensors have {sum(sizes)}")
        shares = [weight / total for weight in weights]
        segments = zip(*(torch.split(contribution, list(sizes)) for contribution in contributions), strict=True)
        return torch.cat([self._of(tensors, shares) for tensors in segments])

    @abstractmethod
    def _of(self, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        """One tensor for many, whose shares of the weight add up to 1."""


@dataclass(frozen=True, kw_only=True)
class DirectionAverage(PerTensor):
    """Radial-directional averaging: the mean of the norms times the direction of the mean direction, per tensor.

        (sum_i w_i |x_i| / sum w) phi(sum_i w_i phi(x_i)), phi(x) = x / |x|, phi(0) = 0

    Decoupled DiLoCo, arXiv 2604.21428: contributions are nearly orthogonal, so that the norm of their plain mean
    shrinks with their number, and this one's does not. There, embeddings take the plain mean.
    """

    def _of(self, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        norms = [norm(tensor) for tensor in tensors]
        radius = sum(share * length for share, length in zip(shares, norms, strict=True))
        factors = [share / length if length else 0.0 for share, length in zip(shares, norms, strict=True)]
        direction, pairs = torch.empty_like(tensors[0]), list(zip(tensors, factors, strict=True))
        for chunk in chunks(direction.numel()):
            # In float64: 1 / norm may lie beyond fp32's range.
            direction[chunk] = sum(tensor[chunk].double() * factor for tensor, factor in pairs)
        length = norm(direction)
        return direction.mul_(radius / length) if length else direction


def check_contributions(contributions: Sequence[Tensor], weights: Sequence[float]) -> float:
    """The sum of the weights.

    Raises:
        ValueError: no contributions, differing shapes or counts, or a weight that is not finite and above 0.
    """
    if not contributions or len(contributions) != len(weights):
        raise ValueError(f"{len(contributions)} contributions with {len(weights)} weights: must be equal and above 0")
    for index, contribution in enumerate(contributions):
        if contribution.shape != contributions[0].shape:
            raise ValueError(f"contribution {index} has shape {tuple(contribution.shape)}, the first has another")
    return check_weights(weights)


def check_weights(weights: Sequence[float]) -> float:
    """The sum of the weights.

    Raises:
        ValueError: no weights, or one that is not finite and above 0.
    """
    if not weights:
        raise ValueError("0 weights: must be above 0")
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weights[{index}]={weight}: must be finite and above 0")
    total = float(sum(weights))
    if not math.isfinite(total):
        raise ValueError(f"the weights add up to {total}: must be finite")
    return total


def scaled_sum(contributions: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """sum_i f_i x_i as a new fp32 [n], added in the given order."""
    result = torch.mul(contributions[0], factors[0])
    for contribution, factor in zip(contributions[1:], factors[1:], strict=True):
        add_scaled(result, contribution, factor)
    return result
