"""Work by measured speed and bandwidth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import UserError
from peer.outer.aggregate.base import Mean
from peer.outer.compress.base import PayloadError
from peer.outer.compress.registry import codec, compressor
from peer.outer.policy.claims import Claim
from peer.outer.policy.work_allocation import (
    AdaptiveTopK,
    Allotment,
    EvenSplit,
    TimeBalanced,
    exchange_s,
    ratios,
)
from peer.outer.state.gathered_update import GatherFormat
from peer.outer.state.reduced_update import ReduceFormat
from peer.outer.topology.topologies import Links

speeds_of = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)
rates_of = st.lists(st.floats(1e4, 1e9), min_size=9, max_size=9)


def links(*rates: float) -> Links:
    return Links(up=rates, down=rates)


def test_even_split_gives_what_is_left_to_the_first() -> None:
    work = EvenSplit().allocate([1.0, 9.0, 1.0], links(1.0, 2.0, 3.0), 11, 100)
    assert work.steps == (4, 4, 3)
    assert work.shares == (1 / 3, 1 / 3, 1 / 3)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("total", [1, 7, 500])
def test_equal_peers_get_an_even_split(count: int, total: int) -> None:
    arguments = ([1.7] * count, links(*[3e6] * count), total, 12_345_678)
    balanced, even = TimeBalanced().allocate(*arguments), EvenSplit().allocate(*arguments)
    assert balanced.steps == even.steps
    assert balanced.shares == pytest.approx(even.shares, rel=1e-12)


def test_steps_follow_speed_where_links_are_equal() -> None:
    work = TimeBalanced().allocate([1.0, 2.0, 3.0, 4.0], links(*[1e9] * 4), 100, 4)
    assert work.steps == (10, 20, 30, 40)


def test_no_step_of_a_slow_peer_is_rounded_up_while_the_others_wait() -> None:
    work = TimeBalanced().allocate([1.0, 1.0, 0.1], links(*[1e15] * 3), 90, 4)
    assert work.steps == (43, 43, 4)  # of 42.86, 42.86 and 4.29; a fifth would take 50 s, not 43
    assert TimeBalanced().allocate([1.0, 1.0, 0.16], links(*[1e15] * 3), 90, 4).steps == (42, 42, 6)  # of 6.67


def test_no_peer_makes_more_than_twice_its_even_part() -> None:
    assert TimeBalanced().allocate([1000.0, 1.0, 1.0], links(*[1e15] * 3), 90, 4).steps == (60, 15, 15)
    assert TimeBalanced(most=3.0).allocate([1000.0, 1.0, 1.0], links(*[1e15] * 3), 90, 4).steps == (90, 0, 0)
    assert (TimeBalanced().most_steps(30), EvenSplit().most_steps(30)) == (60, 30)
    with pytest.raises(UserError, match=r"most=0.5: must be at least 1"):
        TimeBalanced(most=0.5)


def test_work_follows_from_what_the_members_of_a_group_say_and_saw() -> None:
    wire = ReduceFormat(1000, compressor("fp32"))
    claims = [Claim(tokens=430, speed=10.0), Claim(tokens=430, speed=10.0), Claim(tokens=43, speed=1.0)]
    allotted = TimeBalanced().allot(claims, wire, 30, 10)
    assert allotted.steps == (43, 43, 4)
    assert allotted.shares == (334, 333, 333)
    assert EvenSplit().allot(claims, wire, 30, 10) == Allotment()
    line = [replace(claim, seen=seen) for claim, seen in zip(claims, ((4e6, 4e6), (4e6, 4e6), (4e3, 4e3)), strict=True)]
    assert TimeBalanced().allot(line, wire, 30, 10).shares == (500, 500, 0)
    top = GatherFormat(8192, codec("top41/4096+fp32"), Mean())
    sent = AdaptiveTopK(base_ratio=0.01).allot(line[1:] + line[:1], top, 1, 10)
    assert sent == Allotment(shares=(61, 1, 61))
    assert [top.among(sent.shares).bytes_of(place) for place in range(3)] == [
        codec(f"top{k}/4096+fp32").wire_bytes(8192) for k in sent.shares
    ]
    for wrong in ((200, 1, 1), (0, 5000, 0)):
        with pytest.raises(PayloadError):
            top.among(wrong)
    with pytest.raises(PayloadError, match="shards of 999 cells in all; the vector has 1000"):
        wire.among((333, 333, 333))


def test_a_slow_link_reduces_nothing_and_trains_less() -> None:
    # Exchange: peers 0 to 2 (s = 1/3) take 100 (1 + 2/3) / 100 = 5/3 s, peer 3 100 / 10 = 10 s. Then T solves
    # 3 (T - 5/3) + (T - 10) = 85, T = 25.
    work = TimeBalanced().allocate([1.0] * 4, links(100.0, 100.0, 100.0, 10.0), 85, 100)
    assert work.shares == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0.0))
    assert work.steps == (24, 23, 23, 15)
    assert exchange_s(1 / 3, 4, 100.0, 100) == pytest.approx(5 / 3)
    assert exchange_s(1.0, 1, 100.0, 100) == 0.0


@given(speeds=speeds_of, rates=rates_of, total=st.integers(1, 10_000), payload=st.integers(1, 10**9))
def test_sums_are_kept_and_all_finish_together(
    speeds: list[float], rates: list[float], total: int, payload: int
) -> None:
    count = len(speeds)
    rates = rates[:count]
    work = TimeBalanced(most=10.0).allocate(speeds, links(*rates), total, payload)
    assert sum(work.steps) == total
    assert min(work.steps) >= 0
    assert math.fsum(work.shares) == pytest.approx(1.0, abs=1e-12)
    assert min(work.shares) >= 0.0
    exchange = [exchange_s(share, count, rate, payload) for share, rate in zip(work.shares, rates, strict=True)]
    ends = [exchange[peer] + work.steps[peer] / speeds[peer] for peer in range(count)]
    # No peer with work ends later than another would end with more than one step in addition.
    slack = max(ends) * 1e-6
    for peer in range(count):
        if work.steps[peer]:
            start_of_last = ends[peer] - 1 / speeds[peer]
            assert all(start_of_last <= ends[other] + 1 / speeds[other] + slack for other in range(count))


HUGE = 2**53 - 1
claims_of = st.lists(
    st.builds(
        Claim, tokens=st.sampled_from([1, 1276, 1644, 20_000, 2**40 - 1]),
        speed=st.sampled_from([0.0, 1.0, 63.8, 1e5, float(HUGE)]), up=st.sampled_from([0.0, 1.0, 1e6, float(HUGE)]),
        seen=st.lists(st.sampled_from([1.0, 2.0**18, 2.0**23, 3e9]), max_size=3).map(tuple),
    ), min_size=1, max_size=9,
)  # fmt: skip


@given(claims=claims_of, steps=st.integers(1, 500), numel=st.sampled_from([1, 6_064, 30_000_000]))
def test_whatever_members_claim_the_work_is_divided(claims: list[Claim], steps: int, numel: int) -> None:
    wire = ReduceFormat(numel, compressor("int8"))
    work = TimeBalanced().allot(claims, wire, steps, 512)
    assert len(work.steps) == len(claims)
    assert all(1 <= own <= TimeBalanced().most_steps(steps) for own in work.steps)
    assert sum(work.shares) == -(-numel // wire.cell)
    assert min(work.shares) >= 0
    few = AdaptiveTopK(base_ratio=0.1)
    sparse = GatherFormat(numel, codec("top6/64+fp32"), Mean())
    assert sparse.among(few.allot(claims, sparse, steps, 512).shares).shares


def test_half_a_group_at_its_most_leaves_nothing_to_divide() -> None:
    slow = Claim(tokens=25_520, speed=1276.0, seen=(2.0**18,))
    fast = Claim(tokens=32_880, speed=1644.0, seen=(2.0**23,))
    wire = ReduceFormat(30_000_000, compressor("int8"))
    assert TimeBalanced().allot([fast, slow], wire, 30, 512).steps == (60, 1)
    work = TimeBalanced().allocate([1e3] * 2 + [1.0] * 2, links(*[1e15] * 4), 40, 100)
    assert work.steps == (20, 20, 0, 0)


@given(rates=st.lists(st.floats(1e3, 1e9), min_size=3, max_size=9), payload=st.integers(1, 10**9))
def test_shares_make_the_slowest_exchange_short(rates: list[float], payload: int) -> None:
    shares = TimeBalanced(most=9.0).allocate([1.0] * len(rates), links(*rates), 10, payload).shares
    times = [exchange_s(share, len(rates), rate, payload) for share, rate in zip(shares, rates, strict=True)]
    reducing = [time for time, share in zip(times, shares, strict=True) if share > 1e-9]
    assert max(reducing) == pytest.approx(min(reducing), rel=1e-6)
    even = [exchange_s(1 / len(rates), len(rates), rate, payload) for rate in rates]
    assert max(times) <= max(even) * (1 + 1e-9)


def test_ratios_follow_the_uplink_and_keep_the_mean() -> None:
    up = Links(up=(1.0, 2.0, 3.0), down=(9.0, 9.0, 9.0))
    assert ratios(up, 0.2) == pytest.approx((0.1, 0.2, 0.3))
    assert ratios(up, 0.2, minimum=0.15) == pytest.approx((0.15, 0.18, 0.27))
    assert ratios(up, 0.8) == pytest.approx((0.4666666667, 0.9333333333, 1.0))
    assert ratios(up, 1.0) == pytest.approx((1.0, 1.0, 1.0), rel=1e-12)
    assert AdaptiveTopK(base_ratio=0.2).ratios(up) == ratios(up, 0.2)
    assert AdaptiveTopK(base_ratio=0.2).allocate([1.0, 2.0, 3.0], up, 9, 1).steps == (3, 3, 3)


@given(
    rates=st.lists(st.floats(1.0, 1e9), min_size=1, max_size=9),
    base=st.floats(0.001, 1.0),
    clamp=st.floats(0.0, 1.0),
)
def test_the_mean_ratio_is_kept_and_links_finish_together(rates: list[float], base: float, clamp: float) -> None:
    minimum = clamp * base
    found = ratios(links(*rates), base, minimum)
    assert math.fsum(found) / len(found) == pytest.approx(base, rel=1e-9)
    assert all(minimum <= ratio <= 1.0 for ratio in found)
    times = [ratio / rate for ratio, rate in zip(found, rates, strict=True) if minimum < ratio < 1.0]
    assert not times or max(times) == pytest.approx(min(times), rel=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvenSplit().allocate([], Links(up=(), down=()), 1, 1), "0 speeds and 0 links"),
        (lambda: TimeBalanced().allocate([1.0], links(1.0, 1.0), 1, 1), "1 speeds and 2 links"),
        (lambda: TimeBalanced().allocate([0.0], links(1.0), 1, 1), "peer 0 makes 0.0 steps/s"),
        (lambda: TimeBalanced().allocate([1.0], links(1.0), 0, 1), "total_steps=0: must be at least 1"),
        (lambda: TimeBalanced().allocate([1.0], links(1.0), 1, 0), "payload_bytes=0: must be at least 1"),
        (lambda: ratios(links(1.0), 0.0), r"base_ratio=0.0: must be in \(0, 1\]"),
        (lambda: AdaptiveTopK(base_ratio=0.1, minimum=0.2), "minimum=0.2: must be in"),
        (lambda: ratios(Links(up=(), down=()), 0.1), "0 links: must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=message) as error:
        make()
    assert error.value.hint
