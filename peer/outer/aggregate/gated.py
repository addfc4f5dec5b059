"""The aggregator of open runs: gates against what looks malicious, then centred clipping of the rest.

Everything is decided from the inner products of the contributions, see `peer.outer.aggregate.gram`, in Python's
floats: the same on every machine, so that an auditor recomputes a slice exactly. The vectors themselves are read once
more, for the sum. With nothing to drop and nothing to clip, the result is the weighted mean, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from peer.errors import UserError
from peer.outer.aggregate.base import Aggregator, Reasons, check_contributions, scaled_sum
from peer.outer.aggregate.gram import Products, inner_products, largest_magnitude
from peer.outer.aggregate.robust import check_at_least

FEWEST: Final = 3  # of two contributions, no rule can tell which is malicious
_FEWEST_VALUES: Final = 64  # a direction says nothing in fewer dimensions
_STEPS: Final = 3
_CHANCE: Final = 2.0
_OUTLIER: Final = 5.0
_OPPOSED: Final = 0.5
_SHORT: Final = 0.5
_WITNESSES: Final = 8  # fewer hold one malicious at most, for which no other vouches
_ALIKE: Final = 0.99  # where a third of the pairs agrees this well, a copy is nothing special


@dataclass(frozen=True, kw_only=True)
class Gated(Aggregator):
    """Drops contributions that look malicious, then takes the weighted mean of the rest with centred clipping.

    Dropped, in this order: NaN or infinity; zeros where others are not; a norm above `max_norm_ratio` times the median
    norm (proportionally more for a contribution of more than the median tokens); a norm below `min_norm_ratio` times
    the median (proportionally less for fewer tokens), unless more than a third are so short: few may train these
    parameters; a near-duplicate (cosine above `max_duplicate_cosine`) of an earlier contribution, which then counts for
    both, unless most are as alike or both are short; a median cosine to the others below `min_cosine`, or below
    `min_share` of the usual value. The median keeps malicious contributions from vouching for each other. Among fewer
    than eight there is one at most, and medians of so few are chance: there the largest cosine takes its place, and
    what agrees with any other contribution is kept. Two tolerances apply. Random vectors have cosines of about
    1 / sqrt(n) in n dimensions, so twice that is tolerated, among fewer than eight contributions four times. In some
    slices the agreement of honest peers varies widely, so five times the median deviation is tolerated; but not for a
    contribution that opposes the others at least half as much as they agree, if they agree by more than chance:
    otherwise sign flips would pass wherever agreement is low. If more than a third would be dropped for their
    direction, none is: then honest peers do not agree either, and no rule can tell. Among fewer than three
    contributions only zeros and non-finite ones are dropped.

    The vote of a peer in medians and means is its weight, but at most the median weight: neither many peers of little
    weight nor one that claims a large weight outvotes the rest.

    Then centred clipping (Karimireddy et al. 2021, arXiv 2012.10333) in three steps, the radius `radius` times the
    median distance: two towards the mean in which all count alike, so that heavy weights do not make the others look
    far away, the last towards the weighted mean.

    Not chunk-separable: norms need the whole vector.
    """

    separable: ClassVar[bool] = False
    drops_malformed: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    max_norm_ratio: float = 3.0
    min_norm_ratio: float = 0.05
    min_cosine: float = 0.0
    min_share: float = 0.2
    max_duplicate_cosine: float = 0.999
    radius: float = 1.1

    def __post_init__(self) -> None:
        check_at_least("max_norm_ratio", self.max_norm_ratio, 1.0)
        check_at_least("radius", self.radius, 1.0)
        if not -1.0 <= self.min_cosine < 1.0:
            raise UserError(f"min_cosine={self.min_cosine}: must be in [-1, 1)", "0 drops what opposes the rest")
        if not 0.0 <= self.min_norm_ratio < 1.0:
            raise UserError(
                f"min_norm_ratio={self.min_norm_ratio}: must be in [0, 1)", "0.05 drops what has hardly moved"
            )
        if not 0.0 <= self.min_share < 1.0:
            raise UserError(f"min_share={self.min_share}: must be in [0, 1)", "0.2 lets unusual data pass")
        if not 0.0 < self.max_duplicate_cosine <= 1.0:
            raise UserError(
                f"max_duplicate_cosine={self.max_duplicate_cosine}: must be in (0, 1]", "0.999 tells copies apart"
            )

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`; ValueError also if every contribution was dropped."""
        return self.judged(contributions, weights)[0]

    def judged(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> tuple[Tensor, Reasons]:
        kept, reasons, products = self._select(contributions, weights)
        if not kept:
            raise ValueError(f"all {len(contributions)} contributions were dropped; the first: {reasons[0]}")
        shares = self._shares([weights[i] for i in kept], products)
        return scaled_sum([contributions[i] for i in kept], shares), reasons

    def select(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> tuple[tuple[int, ...], Reasons]:
        """Ascending indices of the contributions to keep, and the reason for each index that is dropped.

        Raises:
            ValueError: as `Aggregator.aggregate`.
        """
        kept, reasons, _ = self._select(contributions, weights)
        return kept, reasons

    def _select(
        self, contributions: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[tuple[int, ...], Reasons, Products]:
        """`select`, and the inner products of the kept."""
        check_contributions(contributions, weights)
        magnitudes = [largest_magnitude(contribution) for contribution in contributions]
        finite = [i for i, magnitude in enumerate(magnitudes) if math.isfinite(magnitude)]
        reasons = {i: "holds NaN or infinity" for i in range(len(contributions)) if i not in finite}
        products = inner_products([contributions[i] for i in finite], [magnitudes[i] for i in finite])
        gates = _Gates(self, [weights[i] for i in finite], products, contributions[0].numel())
        found = gates.dropped()
        reasons |= {finite[place]: _named(finite, reason) for place, reason in found.items()}
        places = [place for place in range(len(finite)) if place not in found]
        kept = tuple(finite[place] for place in places)
        return kept, dict(sorted(reasons.items())), [[products[i][j] for j in places] for i in places]

    def _shares(self, weights: Sequence[float], products: Products) -> list[float]:
        """What each contribution is multiplied by: the coordinates of the clipped mean among the contributions."""
        total, count = float(sum(weights)), len(weights)
        plain = [weight / total for weight in weights]
        if count < FEWEST:
            return plain
        alike = [1.0 / count] * count
        norms = [math.sqrt(products[i][i]) for i in range(count)]
        middle = _median(norms, alike)
        centre = [share * _clip(middle, length) for share, length in zip(alike, norms, strict=True)]
        for _ in range(_STEPS - 1):
            centre = self._pulled(centre, alike, alike, products)
        return self._pulled(centre, plain, _voices(weights), products)

    def _pulled(
        self, centre: list[float], shares: list[float], voices: Sequence[float], products: Products
    ) -> list[float]:
        """A step from the centre to the mean with these shares; each pulls as far as the radius at most."""
        distances = _distances(products, centre)
        reach = self.radius * _median(distances, voices)
        clips = [_clip(reach, distance) for distance in distances]
        if min(clips) == 1.0:
            return shares
        pulls = [share * clip for share, clip in zip(shares, clips, strict=True)]
        left = 1.0 - math.fsum(pulls)
        return [left * at + pull for at, pull in zip(centre, pulls, strict=True)]


@dataclass(frozen=True)
class _Gates:
    """The gates over finite contributions, by their places among them."""

    settings: Gated
    weights: Sequence[float]
    products: Products
    numel: int

    def dropped(self) -> dict[int, tuple[str, int | None]]:
        """The reason for each place that is dropped; with the place of the earlier contribution that it copies."""
        count = len(self.weights)
        norms = [math.sqrt(self.products[i][i]) for i in range(count)]
        found: dict[int, tuple[str, int | None]] = {i: (reason, None) for i, reason in self._sized(norms).items()}
        remaining = [i for i in range(count) if i not in found and norms[i] > 0.0]
        if len(remaining) < FEWEST or self.numel < _FEWEST_VALUES:
            return found
        cosines = {
            i: {j: min(1.0, self.products[i][j] / (norms[i] * norms[j])) for j in remaining if j != i}
            for i in remaining
        }
        found |= self._copies(remaining, norms, cosines)
        remaining = [i for i in remaining if i not in found]
        return found | {i: (reason, None) for i, reason in self._opposing(remaining, cosines).items()}

    def _sized(self, norms: Sequence[float]) -> dict[int, str]:
        """What is too long, and what is without substance."""
        some = [i for i, length in enumerate(norms) if length > 0.0]
        found = {i: "norm 0, where others have moved" for i in range(len(norms)) if some and i not in some}
        if len(some) < FEWEST:
            return found
        voices = _voices([self.weights[i] for i in some])
        middle = _median([norms[i] for i in some], voices)
        usual = _median([self.weights[i] for i in some], voices)
        short, unmoved = {}, 0.0
        for i, voice in zip(some, voices, strict=True):
            most = self.settings.max_norm_ratio * max(1.0, self.weights[i] / usual)
            least = self.settings.min_norm_ratio * min(1.0, self.weights[i] / usual)
            if norms[i] > most * middle:
                found[i] = f"norm {norms[i]:.3g} is above {most:.3g} x the median {middle:.3g}"
            elif norms[i] < least * middle:
                short[i] = f"norm {norms[i]:.3g} is below {least:.3g} x the median {middle:.3g}"
                unmoved += voice
        return found | short if 3 * unmoved <= sum(voices) else found

    def _copies(
        self, remaining: Sequence[int], norms: Sequence[float], cosines: Mapping[int, Mapping[int, float]]
    ) -> dict[int, tuple[str, int | None]]:
        pairs = [cosines[i][j] for i in remaining for j in remaining if j < i]
        if 3 * sum(cosine > _ALIKE for cosine in pairs) > len(pairs):
            return {}
        found: dict[int, tuple[str, int | None]] = {}
        # parameters that few peers train shrink by the same weight decay for the others: short and alike, but no copies
        long = _SHORT * _median([norms[i] for i in remaining], [1.0] * len(remaining))
        moving = [i for i in remaining if norms[i] >= long]
        for later in moving:
            for earlier in moving:
                if earlier < later and earlier not in found:
                    cosine = cosines[later][earlier]
                    if cosine > self.settings.max_duplicate_cosine:
                        found[later] = f"near-duplicate (cosine {cosine:.6f}) of contribution", earlier
                        break
        return found

    def _opposing(self, remaining: Sequence[int], cosines: Mapping[int, Mapping[int, float]]) -> dict[int, str]:
        if len(remaining) < FEWEST:
            return {}
        voices = dict(zip(remaining, _voices([self.weights[i] for i in remaining]), strict=True))
        few = len(self.weights) < _WITNESSES
        agreement = {}
        for i in remaining:
            others = [j for j in remaining if j != i]
            to_others = [cosines[i][j] for j in others]
            agreement[i] = max(to_others) if few else _median(to_others, [voices[j] for j in others])
        heard = list(voices.values())
        middle = _median(list(agreement.values()), heard)
        spread = _median([abs(own - middle) for own in agreement.values()], heard)
        chance = (2 if few else 1) * _CHANCE / math.sqrt(self.numel)
        usual = middle - _OUTLIER * spread
        if middle > chance:
            usual = max(usual, -_OPPOSED * middle)
        least = min(max(self.settings.min_cosine, self.settings.min_share * middle) - chance, usual)
        found = {
            i: f"{'largest' if few else 'median'} cosine {own:.3g} to the rest, whose own is {middle:.3g}"
            for i, own in agreement.items()
            if own < least
        }
        return found if 3 * sum(voices[i] for i in found) <= sum(voices.values()) else {}


def _named(finite: Sequence[int], reason: tuple[str, int | None]) -> str:
    text, place = reason
    return text if place is None else f"{text} {finite[place]}"


def _voices(weights: Sequence[float]) -> list[float]:
    """The weights, each at most the lower weighted median."""
    low, _ = _middle(weights, weights)
    return [min(weight, low) for weight in weights]


def _median(values: Sequence[float], voices: Sequence[float]) -> float:
    """The weighted median; the mean of two where the voices split in halves."""
    low, high = _middle(values, voices)
    return low / 2 + high / 2


def _middle(values: Sequence[float], voices: Sequence[float]) -> tuple[float, float]:
    half, heard = math.fsum(voices) / 2, 0.0
    ordered = sorted(zip(values, voices, strict=True))
    for place, (value, voice) in enumerate(ordered):
        heard += voice
        if heard > half:
            return value, value
        if heard == half:
            return value, ordered[min(place + 1, len(ordered) - 1)][0]
    return ordered[-1][0], ordered[-1][0]


def _clip(reach: float, length: float) -> float:
    return reach / length if length > reach else 1.0


def _distances(products: Products, centre: Sequence[float]) -> list[float]:
    """From each contribution to the vector with these coordinates."""
    count = len(centre)
    along = [math.fsum(products[i][j] * centre[j] for j in range(count)) for i in range(count)]
    squared = math.fsum(at * product for at, product in zip(centre, along, strict=True))
    return [math.sqrt(max(0.0, products[i][i] - 2.0 * along[i] + squared)) for i in range(count)]
