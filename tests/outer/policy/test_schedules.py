"""When fragments are sent and applied, and votes for a round."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import UserError
from peer.outer.policy.regular import Schedule
from peer.outer.policy.schedules import (
    ChangeState,
    Event,
    Every,
    GradientChange,
    Strided,
    Timer,
)


def sent(schedule: Schedule, steps: int) -> list[Event]:
    return [event for step in range(steps + 1) for event in schedule.events(step)]


def send_steps(schedule: Schedule, steps: int) -> list[int]:
    return [event.send_step for event in sent(schedule, steps)]


def test_every_h_steps() -> None:
    assert sent(Every(steps=30, overlap_steps=5), 70) == [
        Event(fragment=0, round=1, send_step=30, apply_step=35),
        Event(fragment=0, round=2, send_step=60, apply_step=65),
    ]


def test_the_steps_of_a_round_grow_to_their_bound() -> None:
    growing = Every(steps=10, growth=1.5, max_steps=30)
    assert send_steps(growing, 150) == [10, 25, 47, 77, 107, 137]  # 10, 15, 22 (of 22.5), 30 (of 33.75), 30, ...
    assert send_steps(Every(steps=10, growth=2.0, growth_every_rounds=2), 140) == [10, 20, 40, 60, 100, 140]


def test_a_warm_start_syncs_more_often() -> None:
    warm = Every(steps=10, warm_start_steps=6, warm_start_every=2)
    assert [(event.send_step, event.round) for event in sent(warm, 30)] == [(2, 1), (4, 2), (6, 3), (16, 4), (26, 5)]


@given(
    steps=st.integers(1, 9),
    growth=st.sampled_from([1.0, 1.01, 1.4, 3.0]),
    every=st.integers(1, 4),
    extra=st.one_of(st.none(), st.integers(0, 20)),
    warm=st.integers(0, 4),
    warm_every=st.integers(1, 5),
)
def test_rounds_follow_one_another_at_the_stated_distance(
    steps: int, growth: float, every: int, extra: int | None, warm: int, warm_every: int
) -> None:
    bound = None if extra is None else steps + extra
    schedule = Every(
        steps=steps, growth=growth, growth_every_rounds=every, max_steps=bound,
        warm_start_steps=warm * warm_every, warm_start_every=warm_every,
    )  # fmt: skip
    events = sent(schedule, 300)
    assert [event.round for event in events] == list(range(1, len(events) + 1))
    distances = [b - a for a, b in itertools.pairwise([0, *(event.send_step for event in events)])]
    expected = [warm_every] * warm
    expected += [min(bound or 10**9, round(steps * growth ** (r // every))) for r in range(max(0, len(events) - warm))]
    assert distances == expected
    assert events == sorted(events, key=lambda event: event.send_step)


def test_strided_fragments_are_sent_in_turn() -> None:
    events = sent(Strided(period=10, num_fragments=3, overlap_steps=2), 20)
    assert [(event.send_step, event.fragment, event.round) for event in events] == [
        (3, 1, 1), (6, 2, 1), (10, 0, 1), (13, 1, 2), (16, 2, 2), (20, 0, 2),
    ]  # fmt: skip
    assert all(event.apply_step == event.send_step + 2 for event in events)


def test_one_fragment_without_overlap_is_every_h_steps() -> None:
    assert sent(Strided(period=30, num_fragments=1), 200) == sent(Every(steps=30), 200)


@given(
    sizes=st.integers(1, 60).flatmap(lambda period: st.tuples(st.just(period), st.integers(1, period))),
    start=st.integers(1, 500),
)
def test_each_fragment_exactly_once_per_period_at_its_offset(sizes: tuple[int, int], start: int) -> None:
    period, count = sizes
    schedule = Strided(period=period, num_fragments=count)
    events = [event for step in range(start, start + period) for event in schedule.events(step)]
    assert sorted(event.fragment for event in events) == list(range(count))
    assert all(event.send_step % period == schedule.offset(event.fragment) % period for event in events)
    later = [event for step in range(start + period, start + 2 * period) for event in schedule.events(step)]
    assert [event.round for event in later] == [event.round + 1 for event in events]
    assert schedule.events(0) == ()
    first = {event.fragment: event.round for event in reversed(sent(schedule, 2 * period))}
    assert first == dict.fromkeys(range(count), 1)


@given(rate=st.floats(0.01, 5.0))
def test_a_timer_makes_rate_rounds_per_step(rate: float) -> None:
    events = sent(Timer(rate=rate), 200)
    assert [event.round for event in events] == list(range(1, len(events) + 1))
    assert len(events) == math.floor(rate * 200)


@given(rate=st.floats(0.01, 1.0), number=st.integers(1, 300))
def test_a_timers_rounds_are_those_that_its_steps_have(rate: float, number: int) -> None:
    timer = Timer(rate=rate)
    event = timer.event(number)
    assert timer.events(event.send_step) == (event,)
    assert timer.shortest <= timer.length(number) <= timer.longest(None)


def test_a_timer_of_1_fires_each_step() -> None:
    assert send_steps(Timer(), 4) == [1, 2, 3, 4]
    assert send_steps(Timer(rate=0.5), 5) == [2, 4]
    assert send_steps(Timer(rate=2.0), 2) == [1, 1, 2, 2]


def votes(rule: GradientChange, norms: list[float]) -> list[bool]:
    state, cast = ChangeState(), []
    for norm in norms:
        state, wanted = rule.vote(state, norm)
        cast.append(wanted)
    assert state.step == len(norms)
    return cast


NORMS = [1.0 + 0.3 * math.sin(step) for step in range(60)]


def test_delta_0_syncs_always_and_infinity_in_the_warm_up_only() -> None:
    assert votes(GradientChange(delta=0.0), NORMS) == [True] * 60
    assert votes(GradientChange(delta=math.inf), [*NORMS[:50], 0.0, 0.0, 1e30]) == [True] * 25 + [False] * 28


def test_a_jump_of_the_gradient_asks_for_a_round() -> None:
    # The average moves by 2 / 26 of the jump: 30% of it takes a norm 4.9 times as large.
    cast = votes(GradientChange(), [1.0] * 40 + [4.8] + [1.0])
    assert cast == [True] * 25 + [False] * 17
    assert votes(GradientChange(), [1.0] * 40 + [5.0] + [1.0]) == [True] * 25 + [False] * 15 + [True, False]
    assert votes(GradientChange(smoothing=1, delta=0.5), [2.0, 2.9, 4.5, 2.2]) == [True, False, True, True]


def test_overflows_and_zeros_do_no_harm() -> None:
    rule = GradientChange(smoothing=1)
    assert votes(rule, [1.0, math.inf, math.nan, 1.0]) == [True, False, False, False]
    assert votes(rule, [0.0, 0.0, 1.0]) == [True, False, True]
    assert rule.vote(ChangeState(step=9), math.nan) == (ChangeState(step=10), False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(steps=0), "steps=0: must be at least 1"),
        (lambda: Every(steps=5, overlap_steps=6), r"overlap_steps=6: must be in \[0, 5\]"),
        (lambda: Every(steps=5, overlap_steps=3, warm_start_steps=4, warm_start_every=2), r"must be in \[0, 2\]"),
        (lambda: Every(steps=5, growth=0.5), "growth=0.5: must be finite and at least 1"),
        (lambda: Every(steps=5, max_steps=4), "max_steps=4: must be at least steps=5"),
        (lambda: Every(steps=5, warm_start_steps=5, warm_start_every=2), "must be a multiple of warm_start_every=2"),
        (lambda: Strided(period=0, num_fragments=1), "period=0: must be at least 1"),
        (lambda: Strided(period=5, num_fragments=6), r"num_fragments=6: must be in \[1, period=5\]"),
        (lambda: Strided(period=5, num_fragments=1, overlap_steps=6), r"must be in \[0, period=5\]"),
        (lambda: Timer(rate=0.0), r"rate=0.0: must be in \[1 / 16777216, 16777216\]"),
        (lambda: Timer(rate=0.3, overlap_steps=4), r"overlap_steps=4: must be in \[0, 3\], the shortest round"),
        (lambda: GradientChange(delta=-0.1), "delta=-0.1: must be at least 0"),
        (lambda: GradientChange(smoothing=0), "smoothing=0: must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=message) as error:
        make()
    assert error.value.hint


def test_the_progress_of_the_run_counts_no_step_of_a_late_round() -> None:
    schedule = Every(steps=30)
    assert [schedule.global_step(0, 0), schedule.global_step(2, 7), schedule.global_step(2, 45)] == [0.0, 67.0, 90.0]
    assert schedule.global_step(3, 0) == schedule.global_step(2, 30)


@given(
    steps=st.integers(1, 40), growth=st.floats(1.0, 1.5), every=st.integers(1, 4), warm=st.integers(0, 5),
    warm_every=st.integers(1, 7), limit=st.integers(0, 100),
)
def test_lengths_of_rounds_are_what_the_events_say(
    steps: int, growth: float, every: int, warm: int, warm_every: int, limit: int
) -> None:
    schedule = Every(
        steps=steps, growth=growth, growth_every_rounds=every, warm_start_steps=warm * warm_every,
        warm_start_every=warm_every, max_steps=steps + limit,
    )
    sent = [event.send_step for step in range(1, 400) for event in schedule.events(step)]
    assert sent == [schedule.begins(round + 1) for round in range(1, len(sent) + 1)]
    lengths = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    assert lengths == [schedule.length(round) for round in range(1, len(sent) + 1)]
    assert schedule.longest(len(sent)) == max([schedule.length(1), *lengths])


@given(period=st.integers(1, 40), fragments=st.integers(1, 40), overlap=st.integers(0, 40), steps=st.integers(1, 40))
def test_the_rounds_of_a_run_are_the_events_of_its_steps(period: int, fragments: int, overlap: int, steps: int) -> None:
    for schedule in (
        Strided(period=period, num_fragments=min(fragments, period), overlap_steps=min(overlap, period)),
        Every(steps=steps, overlap_steps=min(overlap, steps)),
    ):
        events = [event for step in range(1, 200) for event in schedule.events(step)]
        assert events == [schedule.event(number) for number in range(1, len(events) + 1)]
        assert schedule.longest(None) == max(period if isinstance(schedule, Strided) else steps, 1)


def test_the_number_of_fragments_follows_from_the_blocks_of_the_model() -> None:
    of_three = Strided(period=100, blocks_per_fragment=3, overlap_steps=1)
    assert [of_three.fitted(blocks).num_fragments for blocks in (0, 1, 3, 4, 12)] == [1, 1, 1, 2, 4]
    assert of_three.fitted(12) == Strided(period=100, num_fragments=4, overlap_steps=1)
    assert replace(of_three, ends="apart").fitted(12).num_fragments == 5
    assert Strided(period=100, num_fragments=7).fitted(12).num_fragments == 7
    published = replace(of_three, num_fragments=3)
    assert [published.fitted(blocks).num_fragments for blocks in (0, 1, 2, 3, 9, 10, 24)] == [1, 1, 2, 3, 3, 4, 8]
    for numbers, said in (({"blocks_per_fragment": 0}, "at least 1"), ({"order": "random"}, "strided or consecutive"),
                          ({"ends": "none"}, "split or apart")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            Strided(period=100, **numbers)
