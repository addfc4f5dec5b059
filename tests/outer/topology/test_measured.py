"""The links that follow from what peers say of them."""

from __future__ import annotations

import pytest

from peer.outer.topology.measured import agreed_links


def said(rates: list[list[float]]) -> list[dict[int, float]]:
    return [{j: rate for j, rate in enumerate(row) if j != i and rate} for i, row in enumerate(rates)]


HONEST = [[0, 8.0, 8.0, 1.0], [8.0, 0, 8.0, 1.0], [8.0, 8.0, 0, 1.0], [1.0, 1.0, 1.0, 0]]


def between(rates: list[list[float]], i: int, j: int) -> float:
    links = agreed_links(said(rates))
    assert links is not None
    assert links.between(range(len(rates)))[i, j] == links.between(range(len(rates)))[j, i]
    return float(links.between(range(len(rates)))[i, j])


def test_of_each_two_the_lower_of_what_both_say() -> None:
    assert between(HONEST, 0, 1) == 8.0
    rates = [list(row) for row in HONEST]
    rates[0][1] = 6.0
    assert between(rates, 0, 1) == 6.0
    assert between(rates, 0, 3) == between(rates, 2, 3) == 1.0


@pytest.mark.parametrize("liar", [0, 3])
@pytest.mark.parametrize("claim", [1e-6, 1e12])
def test_who_lies_moves_its_links_by_a_factor_of_two_at_most_and_no_others(liar: int, claim: float) -> None:
    rates = [list(row) for row in HONEST]
    rates[liar] = [claim] * 4
    for i in range(4):
        for j in range(i):
            low, high = (0.5, 1.0) if liar in (i, j) else (1.0, 1.0)  # the other end's word limits a boast
            assert low * HONEST[i][j] <= between(rates, i, j) <= high * HONEST[i][j]


def test_what_nobody_measured_is_slow_and_without_a_word_all_are_alike() -> None:
    rates = [list(row) for row in HONEST]
    rates[0][1] = rates[1][0] = 0.0
    assert between(rates, 0, 1) == 1.0
    rates[1][0] = 7.0
    assert between(rates, 0, 1) == 7.0
    assert agreed_links([{}, {}, {}]) is None
    assert agreed_links([]) is None
