"""Aggregators that withstand some malicious contributions. None can at an honest cosine below about .1.

Medians here count every contribution once, whatever its weight: who may contribute, and with which weight, is decided
at admission. The vectors must be finite; `peer.outer.aggregate.gated` alone takes NaN and infinity, and drops them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.aggregate.base import Aggregator, check_contributions, scaled_sum
from peer.outer.numerics.ordered_sums import chunks, fold, norm


@dataclass(frozen=True, kw_only=True)
class ClippedMean(Aggregator):
    """The weighted mean after scaling every norm down to at most `factor` times the median norm.

    Zero vectors do not count in the median. Not chunk-separable: norms need the whole vector.
    """

    separable: ClassVar[bool] = False
    robust: ClassVar[bool] = True
    factor: float = 3.0

    def __post_init__(self) -> None:
        check_at_least("factor", self.factor, 1.0)

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`; with nothing to clip the result is `weighted_mean`'s, bit for bit."""
        total = check_contributions(contributions, weights)
        norms = [norm(contribution) for contribution in contributions]
        limit = self.factor * _median_norm(norms)
        clips = [limit / length if length > limit else 1.0 for length in norms]
        return scaled_sum(contributions, [weight / total * clip for weight, clip in zip(weights, clips, strict=True)])


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregator):
    """Per element, the mean without the floor(fraction * R) smallest and as many largest values.

    Yin et al. 2018, arXiv 1803.01498, definition 2. All weigh alike. Chunk-separable.
    """

    separable: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    fraction: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction < 0.5:
            raise UserError(f"fraction={self.fraction}: must be in [0, 0.5)", "0.25 withstands a quarter of the peers")

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`; the weights are checked and not used."""
        check_contributions(contributions, weights)
        cut = math.floor(self.fraction * len(contributions))
        return _mean_of_ranks(contributions, cut, len(contributions) - cut)


@dataclass(frozen=True, kw_only=True)
class CoordinateMedian(Aggregator):
    """Per element, the median; of an even number, the mean of the middle two (arXiv 1803.01498, definition 1).

    All weigh alike. Chunk-separable.
    """

    separable: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`; the weights are checked and not used."""
        check_contributions(contributions, weights)
        return _mean_of_ranks(contributions, (len(contributions) - 1) // 2, len(contributions) // 2 + 1)


@dataclass(frozen=True, kw_only=True)
class CentredClipping(Aggregator):
    """v <- v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|) / sum w, from the coordinate median.

    Karimireddy et al. 2021, arXiv 2012.10333, with tau = median_i |x_i - v0| fixed from the start. Ends when a step
    is shorter than `tolerance` tau, or after `iterations`. Not chunk-separable: distances need the whole vector.
    """

    separable: ClassVar[bool] = False
    robust: ClassVar[bool] = True
    iterations: int = 20
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise UserError(f"iterations={self.iterations}: must be at least 1", "3 are usually enough")
        if not 0.0 <= self.tolerance < 1.0:
            raise UserError(f"tolerance={self.tolerance}: must be in [0, 1)", "0.0001 is usual")

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        total = check_contributions(contributions, weights)
        centre = CoordinateMedian().aggregate(contributions, weights)
        distances = [_distance(contribution, centre) for contribution in contributions]
        tau = median(distances)
        if tau == 0.0:  # more than half are the same vector
            return centre
        for _ in range(self.iterations):
            clips = [min(1.0, tau / distance) if distance else 1.0 for distance in distances]
            pulls = [weight / total * clip for weight, clip in zip(weights, clips, strict=True)]
            if _pull_(centre, contributions, pulls) < self.tolerance * tau:
                break
            distances = [_distance(contribution, centre) for contribution in contributions]
        return centre


def check_at_least(name: str, value: float, limit: float) -> None:
    if not limit <= value < math.inf:
        raise UserError(f"{name}={value}: must be finite and at least {limit:g}", "3 is usual")


def _median_norm(norms: Sequence[float]) -> float:
    return median([length for length in norms if length] or [0.0])


def _mean_of_ranks(contributions: Sequence[Tensor], first: int, last: int) -> Tensor:
    """Per element, the mean of the values whose rank among the contributions is in [first, last)."""
    share = 1.0 / (last - first)
    out = torch.empty_like(contributions[0])
    for chunk in chunks(out.numel()):
        rows = torch.stack([contribution[chunk] for contribution in contributions])
        _sort_rows_(rows)
        # Minimum and maximum of -0.0 and 0.0 may be either; adding to 0.0 settles the sign.
        out[chunk] = sum(rows[rank] * share for rank in range(first, last)) + 0.0
    return out


def _sort_rows_(rows: Tensor) -> None:
    """Sort each column by odd-even transposition: whole rows at a time, several times faster than `torch.sort`."""
    for turn in range(rows.shape[0]):
        upper, lower = rows[turn % 2 : -1 : 2], rows[turn % 2 + 1 :: 2]
        least = torch.minimum(upper, lower)
        torch.maximum(upper, lower, out=lower)
        upper.copy_(least)


def _distance(x: Tensor, centre: Tensor) -> float:
    """|x - centre|; infinite where the difference leaves fp32's range."""
    squares = ((x[chunk] - centre[chunk]).double().square_() for chunk in chunks(x.numel()))
    return math.sqrt(sum(float(fold(square)) for square in squares))


def _pull_(centre: Tensor, contributions: Sequence[Tensor], pulls: Sequence[float]) -> float:
    """centre <- centre + sum_i pull_i (x_i - centre), in place; returns the length of that step."""
    # A pull of 0 belongs to an infinite distance, whose product with 0 would be NaN.
    near = [(contribution, pull) for contribution, pull in zip(contributions, pulls, strict=True) if pull]
    squared = 0.0
    for chunk in chunks(centre.numel()):
        step = scaled_sum([x[chunk] - centre[chunk] for x, _ in near], [pull for _, pull in near])
        centre[chunk].add_(step)
        squared += float(fold(step.double().square_()))
    return math.sqrt(squared)
