"""What the state transfer benchmark makes of its samples."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import state_transfer
from benchmarks.state_transfer import Done, Transfer, build_parser, in_memory, measure, row
from benchmarks.state_transfer_report import DELAY, MB_PER_SECOND, StateRow, draw, figures, line
from peer.errors import UserError


def fetch(began: float, seconds: float) -> Transfer:
    return Transfer(began=began, ended=began + seconds, adopt_seconds=0.5, chunks=(3, 1), right=True)


def measured(params: int = 125_000_000, donors: int = 2, seconds: float = 4.0) -> StateRow:
    quiet = [(0.0, 1.0), (10.0, 11.2), (20.0, 21.0)]
    mixed = [(30.0, 31.1), (40.0, 41.3), (50.0, 51.0), (60.0, 61.0)]
    during = [fetch(29.5, 1.0), fetch(41.2, 1.0), fetch(51.5, 2.0)]
    done = Done(mixed, during, [1.0, 41.1, 41.6, 52.0])  # the second before its transfer, the last between two rounds
    return row(params, donors, fetch(0.0, 9.0), [fetch(1.0, seconds)] * 3, [6.0, 3.0], quiet, done)


def test_rounds_that_a_transfer_overlaps_are_compared_with_the_others() -> None:
    one = measured()
    assert one.round_seconds_during == pytest.approx([1.1, 1.3])
    assert one.round_seconds == pytest.approx([1.0, 1.2, 1.0, 1.0, 1.0])
    assert one.delay == pytest.approx(1.2)
    assert one.round_seconds_writing == pytest.approx([1.3])
    assert one.delay_writing == pytest.approx(1.3)
    assert (one.seconds_first, one.mb_per_second, one.bytes) == (9.0, 250.0, 1_000_000_000)
    assert line(one) == ("125M", "2", "250", "4.00", "9.00", "0.50", "6.00", "3.00", "1.00", "1.20", "1.20", "1.30")


def test_the_goals() -> None:
    large, one_donor, small = measured(), measured(donors=1), measured(params=10_000_000)
    speed, delay, writing, slowest = figures([large])
    assert (speed.limit, speed.met, delay.limit, delay.met) == (MB_PER_SECOND, True, DELAY, False)
    assert (writing.limit, writing.met, slowest.limit) == (DELAY, False, None)
    assert slowest.value == pytest.approx(1.3 / 1.2)
    assert [figures([cell])[0].limit for cell in (one_donor, small)] == [None, None]
    assert figures([measured(seconds=4.1)])[0].met is False


def test_a_picture_is_drawn(tmp_path) -> None:
    draw(tmp_path / "plot.png", [measured(), measured(donors=4), measured(params=10_000_000)])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", ["--donors 0", "--params 10", "--repeats 0"])
def test_numbers_out_of_range(words: str) -> None:
    with pytest.raises(UserError, match="must be at least"):
        measure(build_parser().parse_args(words.split()), print)


def test_the_newcomer_has_memory_where_there_is_room(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(state_transfer, "MEMORY", tmp_path)
    with in_memory(1) as folder:
        assert Path(folder).parent == tmp_path
    assert not list(tmp_path.iterdir())
    with in_memory(shutil.disk_usage(tmp_path).total) as folder:
        assert folder is None
    monkeypatch.setattr(state_transfer, "MEMORY", tmp_path / "missing")
    with in_memory(1) as folder:
        assert folder is None
