"""What members weigh."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peer.protocol.manifest import TrustSpec
from peer.protocol.weights import WeightRule

OPEN = WeightRule.of(TrustSpec(), 1000)
SEEN = {"a": 10, "b": 25, "c": 11}


def weigh(rule: WeightRule, seen: dict[str, int], **claims: int) -> list[int]:
    return rule.weigh(list(claims.items()), seen)


def test_nobody_weighs_more_than_a_contribution_can_be_or_three_times_the_median() -> None:
    assert weigh(OPEN, {}, a=50, b=5000, c=60) == [50, 180, 60]
    assert weigh(OPEN, {}, a=5000, b=5000) == [1000, 1000]
    assert weigh(OPEN, {}, a=10, b=1000) == [10, 30]  # of two, the lower is the median
    private = WeightRule.of(TrustSpec(mode="private"), 1000)
    assert weigh(private, SEEN, a=10, z=5000) == [10, 1000]


def test_newcomers_hold_a_fifth_together() -> None:
    assert weigh(OPEN, SEEN, a=400, b=400, z=400) == [400, 400, 200]
    assert weigh(OPEN, SEEN, a=400, y=300, z=300) == [400, 50, 50]
    assert weigh(OPEN, SEEN, a=400, z=20) == [400, 20]  # less than the share is left as it is
    assert weigh(OPEN, {**SEEN, "z": 9}, a=400, b=400, z=400) == [400, 400, 200]
    assert weigh(OPEN, {**SEEN, "z": 10}, a=400, b=400, z=400) == [400, 400, 400]


def test_at_the_beginning_all_count_alike() -> None:
    assert weigh(OPEN, {}, a=400, b=400) == [400, 400]
    assert weigh(OPEN, {"a": 9, "b": 9}, a=400, b=400, z=400) == [400, 400, 400]


def test_a_crowd_of_newcomers_alone_makes_no_heavy_lineage() -> None:
    crowd = {f"z{k}": 1000 for k in range(64)}
    assert sum(weigh(OPEN, SEEN, **crowd)) <= 250 + 64


def test_the_median_is_that_of_who_has_passed_probation() -> None:
    assert weigh(OPEN, SEEN, a=100, b=100, x=1, y=1, z=1) == [100, 100, 1, 1, 1]
    assert weigh(OPEN, SEEN, a=100, b=1000, x=1, y=1, z=1) == [100, 300, 1, 1, 1]


def test_a_quarter_that_lies_holds_a_third_and_what_others_can_have_trained_is_not_cut() -> None:
    slow = {f"h{k}": 200 for k in range(12)}
    for liars, honest in ((1, 3), (2, 6), (4, 12)):
        claims = {f"z{k}": 1000 for k in range(liars)} | dict([*slow.items()][:honest])
        weights = weigh(OPEN, {}, **claims)
        assert 3 * sum(weights[:liars]) == sum(weights)  # three times the median each would be half
        assert weights[liars:] == [200] * honest
    assert weigh(OPEN, {}, a=600, **slow) == [600] + [200] * 12  # one of many may be three times as fast
    assert weigh(OPEN, {}, a=400, b=400, c=400, d=400, e=200, f=200, g=200, h=200) == [400] * 4 + [200] * 4
    assert weigh(OPEN, {}, a=400, b=200, c=200, d=200) == [300, 200, 200, 200]
    assert weigh(OPEN, {}, a=50, b=50, c=1, d=1) == [2, 2, 1, 1]


@given(st.lists(st.integers(1, 10**4), min_size=4, max_size=32), st.integers(1, 10**6), st.booleans())
def test_a_quarter_of_liars_gets_no_more_than_a_third_of_what_the_usual_honest_claim(
    honest: list[int], claim: int, passed: bool
) -> None:
    liars = len(honest) // 3
    names = [f"z{k}" for k in range(liars)] + [f"h{k}" for k in range(len(honest))]
    rule = WeightRule.of(TrustSpec(), 10**6)
    seen = dict.fromkeys(names, 12) if passed else {}
    weights = rule.weigh(list(zip(names, [claim] * liars + honest, strict=True)), seen)
    median = sorted(weights)[(len(weights) - 1) // 2]
    assert 3 * sum(sorted(weights)[-(len(weights) // 4) :]) <= sum(weights) or max(weights) == median
    assert all(weight == own for weight, own in zip(weights[liars:], honest, strict=True) if own <= median)


claims = st.lists(st.integers(1, 2**40 - 1), min_size=1, max_size=20)


@given(claims, st.lists(st.integers(0, 20), min_size=20, max_size=20), st.integers(1, 10**6), st.integers(1, 99))
def test_weighing_again_changes_nothing_and_shares_hold(
    tokens: list[int], rounds: list[int], nominal: int, percent: int
) -> None:
    rule = WeightRule.of(TrustSpec(newcomers_share=percent / 100), nominal)
    names = [str(k) for k in range(len(tokens))]
    seen = dict(zip(names, rounds, strict=False)) | {"gone": 50}
    first = rule.weigh(list(zip(names, tokens, strict=True)), seen)
    assert rule.weigh(list(zip(names, first, strict=True)), seen) == first
    assert all(1 <= weight <= nominal for weight in first)
    new = [weight for name, weight in zip(names, first, strict=True) if seen[name] < 10]
    old = sum(first) - sum(new)
    if old and new:
        assert sum(new) - len(new) <= percent / 100 * (old + sum(new) - len(new)) + 1e-6


def test_where_all_weigh_alike_claims_count_for_nothing_and_newcomers_for_a_fifth() -> None:
    alike = replace(OPEN, alike=True)
    assert weigh(alike, {}, a=1, b=5000) == [1000, 1000]
    assert weigh(alike, SEEN, a=1, b=5000, z=3) == [1000, 1000, 500]
    assert weigh(alike, SEEN, a=1000, b=1000, z=500) == [1000, 1000, 500]
