"""What a member's word moves, and what the others saw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.outer.compress.registry import compressor
from peer.outer.policy.claims import (
    SLOWEST,
    UNLIMITED_BYTES_S,
    Claim,
    behind_s_a_byte,
    level_of,
    lines_of,
    rate_of,
    speeds_of,
)
from peer.outer.policy.work_allocation import SLOW_LINE_SHARE, EvenSplit, TimeBalanced
from peer.outer.state.reduced_update import ReduceFormat

LIE = 1000.0
counts = st.integers(3, 9)


def test_speed_is_what_a_member_trained_while_the_others_did() -> None:
    claims = [Claim(tokens=400, speed=100.0), Claim(tokens=40, speed=10.0), Claim(tokens=400)]
    assert speeds_of(claims) == [100.0, 10.0, 100.0]
    assert speeds_of([Claim(tokens=3)]) == [3.0]


@given(count=counts, factor=st.sampled_from([LIE, 1 / LIE]))
def test_a_claimed_speed_moves_no_work_at_all(count: int, factor: float) -> None:
    honest = [Claim(tokens=100 * (1 + place), speed=10.0 * (1 + place)) for place in range(count)]
    lying = [replace(honest[0], speed=honest[0].speed * factor), *honest[1:]]
    assert speeds_of(lying) == speeds_of(honest)


@given(count=counts, liar=st.integers(0, 8), tokens=st.sampled_from([1, 100 * int(LIE), 2**39]))
def test_a_false_count_of_tokens_moves_no_work_of_another_by_more_than_two(count: int, liar: int, tokens: int) -> None:
    wire = ReduceFormat(1000, compressor("fp32"))
    claims = [Claim(tokens=100, speed=10.0)] * count
    claims[liar % count] = Claim(tokens=tokens, speed=10.0)
    steps = TimeBalanced().allot(claims, wire, 30, 1).steps
    assert sum(steps) in (30 * count, 30 * count + 1)  # at least one each
    assert steps[liar % count] <= 60
    assert all(15 <= own <= 60 for place, own in enumerate(steps) if place != liar % count)


@given(count=counts, factor=st.sampled_from([LIE, 1 / LIE]))
def test_a_claimed_line_counts_within_two_of_the_usual_until_others_have_seen_it(count: int, factor: float) -> None:
    honest = [Claim(tokens=1, up=1e6)] * count
    lying = [replace(honest[0], up=1e6 * factor), *honest[1:]]
    assert lines_of(lying).up == (2e6 if factor > 1.0 else 5e5, *[1e6] * (count - 1))
    seen = [replace(claim, seen=(1e6,) * (count - 1)) for claim in lying]
    assert lines_of(seen).up == (1e6,) * count
    said = [replace(honest[0], seen=(1e6 * factor, *(1e6,) * (count - 2)))] * count  # one of the others lies about all
    assert lines_of(said).up == (1e6,) * count


@given(count=counts, factor=st.sampled_from([LIE, 1 / LIE]))
def test_one_false_report_moves_no_line_whose_owner_says_nothing(count: int, factor: float) -> None:
    """Among three there are two reports, of which a false one can only raise the line."""
    honest = [Claim(tokens=1, seen=(1e6,) * (count - 1))] * count
    said = [replace(honest[0], seen=(1e6 * factor, *(1e6,) * (count - 2))), *honest[1:]]
    found, *others = lines_of(said).up
    assert found == (1e6 * factor if count == 3 and factor > 1.0 else 1e6)
    assert others == [1e6] * (count - 1)


@given(count=counts)
def test_no_boast_of_a_line_moves_the_share_of_another_by_more_than_two(count: int) -> None:
    wire = ReduceFormat(4000, compressor("fp32"))
    claims = [Claim(tokens=100, speed=10.0, up=1e4)] * count
    shares = TimeBalanced().allot([replace(claims[0], up=1e4 * LIE), *claims[1:]], wire, 30, 1).shares
    assert shares[0] <= -(-2 * 4000 // count)
    assert all(share >= 4000 / count / 2 - 1 for share in shares[1:])


def test_lines_without_any_word_are_alike_and_what_was_measured_wins() -> None:
    assert lines_of([Claim(tokens=1)] * 2).up == (UNLIMITED_BYTES_S,) * 2
    seen = [Claim(tokens=1, seen=(6e5, 7e5)), Claim(tokens=1, seen=(1e8, 5e7)), Claim(tokens=1, up=3e9)]
    assert lines_of(seen).up == (7e5, 1e8, 1.4e6)  # twice the median line of those that were seen


def test_the_slowest_line_is_waited_for_up_to_eight_times_the_usual_and_a_quarter_of_the_round() -> None:
    """At 10 tokens/s a round took 40 s; 1000 values of 4 bytes go both ways in turn."""
    wire, usual = ReduceFormat(1000, compressor("fp32")), Claim(tokens=400, speed=10.0, up=4000.0)
    for slow in (replace(usual, up=800.0), replace(usual, seen=(800.0,) * 3)):
        claims = [slow, usual, usual, usual]
        assert behind_s_a_byte(claims) == pytest.approx(1 / 800 - 1 / 4000)
        assert TimeBalanced().slow_line_s(claims, wire) == pytest.approx(2 * (5.0 - 1.0))
        assert EvenSplit().slow_line_s(claims, wire) == 0.0
    stuck = [replace(usual, up=1.0), usual, usual]
    assert behind_s_a_byte(stuck) == pytest.approx((SLOWEST - 1.0) / 4000)
    assert TimeBalanced().slow_line_s(stuck, wire) == SLOW_LINE_SHARE * 40.0 < 2 * (SLOWEST - 1.0)
    for alike in ([usual] * 3, [replace(usual, up=0.0)] * 3, [usual, usual, replace(usual, up=1e9)]):
        assert TimeBalanced().slow_line_s(alike, wire) == 0.0


@given(count=counts, rates=st.lists(st.sampled_from([0.0, 1.0, 1e3, 1e6, 1e12]), min_size=9, max_size=9))
def test_no_word_of_one_member_gives_the_others_less_patience_or_more_than_eight_times(
    count: int, rates: list[float]
) -> None:
    claims = [Claim(tokens=1, up=rate) for rate in rates[:count]]
    behind, usual = behind_s_a_byte(claims), min(lines_of(claims).up)
    assert 0.0 <= behind <= SLOWEST / usual
    assert behind_s_a_byte([*claims, Claim(tokens=1)]) == pytest.approx(behind)


@pytest.mark.parametrize("rate", [1.0, 700.0, 625_000.0, 12.5e6, 1e9])
def test_a_rate_is_told_by_one_character_to_a_half_octave(rate: float) -> None:
    assert rate_of(level_of(rate)) == pytest.approx(rate, rel=0.19)
    assert level_of(rate_of(level_of(rate))) == level_of(rate)


def test_what_nobody_saw_has_a_character_of_its_own() -> None:
    assert (level_of(0.0), rate_of(".")) == (".", 0.0)
    assert rate_of(level_of(1e30)) == rate_of("_") == 2.0**31 * 2**0.5
