"""The place of a run, its pace, and its loss as a curve."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from peer.telemetry.course import MAX_POINTS, Course, CoursePoint, LossChart


def course(rounds_total=None, tokens_total=None):
    now = [0.0]
    made = Course(rounds_total, tokens_total, clock=lambda: now[0])

    def add(at, round, tokens=0, loss=1.0):
        now[0] = at
        made.add(round, tokens, loss)

    return made, add


def test_the_end_is_foretold_from_the_pace_of_the_last_minutes() -> None:
    made, add = course(rounds_total=100)
    assert (made.share, made.eta_s, made.in_words()) == (None, None, "")
    add(0.0, 10)
    assert (made.share, made.eta_s) == (0.1, None)
    add(5.0, 11)
    assert made.eta_s is None, "five seconds are too few"
    add(100.0, 20)
    assert made.eta_s == pytest.approx(800.0)
    made.utilisation = 0.974
    assert made.in_words() == "round 20 of 100 (20%), done in 13.3 min, 97% of the time training"
    add(2000.0, 20)
    assert made.eta_s is None, "nothing has moved for a long time"
    add(2050.0, 100)
    assert (made.eta_s, made.in_words().split(",")[1]) == (0.0, " done")


def test_a_run_ends_at_the_first_of_its_two_ends_and_perhaps_never() -> None:
    made, add = course(rounds_total=100, tokens_total=1000)
    add(0.0, 10, 500)
    add(100.0, 20, 750)
    assert (made.share, made.eta_s) == (0.75, pytest.approx(100.0))
    endless, add = course()
    add(0.0, 10)
    add(100.0, 20)
    assert (endless.share, endless.eta_s, endless.in_words()) == (None, None, "round 20")


def test_points_are_thinned_out_and_the_newest_stays() -> None:
    made, add = course()
    for at in range(5 * MAX_POINTS):
        add(float(at), at)
        assert len(made.points) <= MAX_POINTS
        assert made.points[-1].round == at
    assert made.points[0].round == 0


def drawn(points, width=60, lines=6):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(LossChart(points, lines))
    return console.file.getvalue().splitlines()


def test_a_falling_loss_goes_down_from_the_left_to_the_right() -> None:
    points = [CoursePoint(time=float(k), round=k, tokens=k, loss=5.0 - k / 100) for k in range(200)]
    lines = drawn(points)
    assert len(lines) == 6
    canvas = [line[10:].ljust(50) for line in lines[:-1]]
    first = [next(row for row in range(5) if canvas[row][column] != " ") for column in range(50)]
    assert first == sorted(first)
    assert (first[0], first[-1]) == (0, 4)
    levels = [line[:8].strip() for line in lines[:5]]
    assert [bool(level) for level in levels] == [True, False, True, False, True]
    assert [float(level) for level in levels[::2]] == pytest.approx([4.8, 4.0, 3.2], abs=0.05)
    assert lines[-1].endswith("loss: training over the last 3.3 min")


def test_validation_is_drawn_beside_it_and_one_spike_scales_nothing() -> None:
    losses = [2.0 + (k == 7) * 1e6 for k in range(200)]
    points = [CoursePoint(time=float(k), round=k, tokens=k, loss=loss, validation=1.0) for k, loss in enumerate(losses)]
    lines = drawn(points)
    assert "training validation" in lines[-1]
    assert float(lines[0][:8]) < 2.1


@pytest.mark.parametrize(
    "points",
    [[], [CoursePoint(time=1.0, round=1, tokens=1, loss=1.0)],
     [CoursePoint(time=float(k), round=1, tokens=1) for k in range(9)],
     [CoursePoint(time=float(k), round=1, tokens=1, loss=float("nan")) for k in range(9)]],
)  # fmt: skip
def test_nothing_is_drawn_of_nothing(points) -> None:
    assert drawn(points) in ([], [""])


def test_a_constant_loss_is_a_line() -> None:
    lines = drawn([CoursePoint(time=float(k), round=1, tokens=1, loss=2.0) for k in range(9)])
    assert sum(bool(line[10:].strip()) for line in lines[:-1]) == 1
