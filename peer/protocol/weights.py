"""What the members of a roster weigh: the same on every peer, from claims and from the certified chain alone.

Integers throughout, so that all peers round alike. A rule is idempotent: applying it to its own result changes nothing,
so a link of a chain can be checked without the claims that led to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from peer.protocol.manifest import TrustSpec

Claim = tuple[str, int]
"""(peer id, tokens)."""
_WHOLE = 1000  # shares are counted in thousandths


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """Claimed tokens -> weights.

    Attributes:
        nominal_tokens: of one regular contribution: the largest weight of a member.
        alike: whatever a member claims, it counts as one regular contribution.
        largest_weight: the most as a multiple of the roster's median; None for no such limit.
        probation_rounds: a peer that fewer committed rounds of this lineage have seen is a newcomer.
        newcomers_thousandths: the most that all newcomers of a roster weigh together, of the whole.
    """

    nominal_tokens: int = 2**40
    alike: bool = False
    largest_weight: int | None = None
    probation_rounds: int = 0
    newcomers_thousandths: int = _WHOLE

    @classmethod
    def of(cls, trust: TrustSpec, nominal_tokens: int) -> WeightRule:
        """The rule of a run: in a private one, weights are only capped by what a contribution can be."""
        if trust.mode == "private":
            return cls(nominal_tokens=nominal_tokens)
        return cls(
            nominal_tokens=nominal_tokens,
            largest_weight=trust.largest_weight,
            probation_rounds=trust.probation_rounds,
            newcomers_thousandths=round(trust.newcomers_share * _WHOLE),
        )

    def weigh(self, claims: Sequence[Claim], seen: Mapping[str, int]) -> list[int]:
        """The weights in the order of the claims.

        Args:
            claims: of a roster, at least one token each.
            seen: rounds of the lineage so far that each peer was in; a missing peer was in none.

        Before a first peer of the lineage has passed probation, all count alike: a run must begin. Later, a roster
        of newcomers alone weighs as little as newcomers beside one nominal contribution would, so that a crowd of them
        makes no heavy lineage of its own.
        """
        tokens = [self.nominal_tokens if self.alike else min(claimed, self.nominal_tokens) for _, claimed in claims]
        old = [seen.get(peer_id, 0) >= self.probation_rounds for peer_id, _ in claims]
        tokens = self._within_median(tokens, old)
        if all(old) or max(seen.values(), default=0) < self.probation_rounds:
            return tokens
        return self._within_median(self._within_share(tokens, old), old)

    def _within_share(self, tokens: list[int], old: list[bool]) -> list[int]:
        """Newcomers scaled down to their share, but for one token each: a weight is at least that."""
        if self.newcomers_thousandths >= _WHOLE:
            return tokens
        trusted = sum(weight for weight, is_old in zip(tokens, old, strict=True) if is_old)
        claimed = sum(tokens) - trusted
        limit = (trusted or self.nominal_tokens) * self.newcomers_thousandths // (_WHOLE - self.newcomers_thousandths)
        if claimed <= limit + old.count(False):
            return tokens
        return [
            weight if is_old else max(1, weight * limit // claimed)
            for weight, is_old in zip(tokens, old, strict=True)
        ]

    def _within_median(self, tokens: list[int], old: list[bool]) -> list[int]:
        """Capped at a multiple of the lower median of the peers that passed probation, or of all if none has; and
        what the heaviest quarter of these claims, at a third of what they weigh together.
        """
        if self.largest_weight is None:
            return tokens
        voices = [weight for weight, is_old in zip(tokens, old, strict=True) if is_old] or tokens
        most = min(self.largest_weight * median_low(voices), _quarter_cap(voices))
        return [min(weight, most) for weight in tokens]


def _quarter_cap(weights: Sequence[int]) -> int:
    """The largest weight of which a quarter of the members holds no more than a third together; at least the median.

    Time passes for all alike, so what the others have trained is the only measure of what a member can have: it may be
    faster than they are, but a quarter that lies shall not hold half of a round.
    """
    ranked = sorted(weights, reverse=True)
    few, usual = len(ranked) // 4, median_low(ranked)

    def excess(cap: int) -> int:
        return 2 * sum(min(weight, cap) for weight in ranked[:few]) - sum(min(weight, cap) for weight in ranked[few:])

    if excess(ranked[0]) <= 0:
        return ranked[0]
    return usual + bisect_right(range(usual + 1, ranked[0]), 0, key=excess)  # above 0 once, it stays so
