"""Whole numbers add up to their total, and none is one off or more."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.outer.numerics.apportion import largest_remainder


@pytest.mark.parametrize(("total", "shares", "counts"), [
    (10, (0.5, 0.3, 0.2), (5, 3, 2)),
    (7, (0.5, 0.5), (4, 3)),
    (3, (0.45, 0.45, 0.1), (2, 1, 0)),
    (100, (0.29, 0.71), (29, 71)),  # 0.29 * 100 is 28.999... in floats
    (1, (0.2, 0.8), (0, 1)),
    (5, (0.0, 1.0), (0, 5)),
    (0, (0.5, 0.5), (0, 0)),
    (11, (1.0, 1.0, 1.0), (4, 4, 3)),
])  # fmt: skip
def test_the_largest_remainders_get_one_more(total: int, shares: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert largest_remainder(shares, total) == counts
    assert largest_remainder([Fraction(str(share)) for share in shares], total) == counts


def test_equal_remainders_are_equal_for_floats_and_differences_of_fractions_count() -> None:
    shares = [0.1, 0.2, 0.3, 0.4]
    for total in range(1, 50):
        exact = largest_remainder([Fraction(str(share)) for share in shares], total)
        assert largest_remainder(shares, total) == exact
    almost = [Fraction(1, 2), Fraction(1, 2) + Fraction(1, 10**15)]
    assert largest_remainder(almost, 7) == (3, 4)
    assert largest_remainder([float(share) for share in almost], 7) == (4, 3)


@given(shares=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), total=st.integers(0, 10**6), exact=st.booleans())
def test_the_sum_is_kept_and_each_is_less_than_one_off(shares: list[float], total: int, exact: bool) -> None:
    counts = largest_remainder([Fraction(share) for share in shares] if exact else shares, total)
    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - share / math.fsum(shares) * total) < 1 + 1e-6
