"""Whole numbers in proportion to shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def largest_remainder(shares: Sequence[float] | Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Whole numbers in proportion to `shares` that add up to `total` exactly; each less than 1 off (Hamilton's method).

    All quotas are rounded down, then those with the largest remainders get one more, the first of equals first.
    Remainders of floats are equal where they differ by less than rounding may leave; those of fractions are exact.
    """
    sum_ = math.fsum(shares) if isinstance(shares[0], float) else sum(shares)
    assert sum_ > 0, f"shares add up to {sum_}"
    quotas = [share / sum_ * total for share in shares]
    counts = [math.floor(quota) for quota in quotas]
    surplus = [count - quota for count, quota in zip(counts, quotas, strict=True)]
    order = sorted(range(len(counts)), key=lambda at: round(surplus[at], 9) if isinstance(sum_, float) else surplus[at])
    for at in order[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)
