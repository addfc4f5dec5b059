"""Goodput under faults: what is made of kills and commits, and a small swarm of real peers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.figures import run_benchmark
from benchmarks.goodput import build_parser, fault_times, measure, row_of
from benchmarks.goodput_report import GoodputRow, draw, figures, goodput, line, lost_to_starts


def commit(time: float, round: int, *weights: int) -> dict[str, object]:
    return {"time": time, "round": round, "weights": list(weights), "members": ["peer"] * len(weights)}


def rows() -> list[GoodputRow]:
    quiet = row_of(0, (0.0, 20.0), [[commit(1.0, 1, 10, 10), commit(6.0, 2, 10, 10)]] * 2, [], 1.0)
    first = [commit(1.0, 1, 10, 10), commit(8.0, 2, 10), commit(15.0, 3, 5, 3)]
    late = commit(21.0, 4, 9)
    return [quiet, row_of(60, (0.0, 20.0), [first, [first[0], first[2], late]], [(5.0, 1), (18.0, 0)], 1.0)]


def test_a_round_counts_once_and_a_fault_is_timed_to_the_next_commit_and_to_the_return() -> None:
    quiet, faulty = rows()
    assert (quiet.tokens, quiet.rounds, quiet.members, quiet.faults) == (40, 2, 2.0, 0)
    assert (faulty.tokens, faulty.rounds, faulty.faults) == (38, 3, 2)
    assert (faulty.commit_s, faulty.return_s) == ((3.0, 3.0), (10.0,))
    assert goodput(faulty, rows()) == pytest.approx(95.0)
    assert line(faulty, rows())[:9] == ("60", "95.0%", "38", "3", "1.7", "2", "3.0 s", "10.0 s", "1")


def test_what_starts_of_processes_cost_is_told() -> None:
    assert lost_to_starts(rows()[:1], 2) == ""
    assert lost_to_starts(rows(), 2) == (
        "A victim trains nothing while its processes start, which takes 10 s at the median: "
        "25.0 of the 5.0 points that 60 faults an hour cost."
    )


def test_the_goal_is_of_one_fault_a_minute() -> None:
    found = {figure.name: figure for figure in figures(rows())}
    assert (found["60 faults an hour: goodput"].limit, found["60 faults an hour: goodput"].met) == (97.0, False)
    assert found["60 faults an hour: kill to the victim's return, longest"].value == 10.0
    assert not any(name.startswith("0 ") for name in found)


@pytest.mark.parametrize(("rate", "count"), [(0, 0), (30, 5), (60, 10), (120, 20)])
def test_so_many_faults_come_in_ten_minutes_each_in_a_time_of_its_own(rate: int, count: int) -> None:
    times = fault_times(rate, 600.0, random.Random(1))
    assert len(times) == count
    assert [int(time * rate // 3600) for time in times] == list(range(count))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "goodput.png", rows())
    assert (tmp_path / "goodput.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_real_peers_of_which_one_is_killed_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "goodput.json"
    monkeypatch.setattr(sys, "argv", [
        "goodput", "--peers", "3", "--rates", "60", "--minutes", "1.5", "--report", str(report),
    ])  # fmt: skip
    run_benchmark(build_parser(), measure)
    quiet, faulty = json.loads(report.read_text())["rows"]
    assert (quiet["faults"], faulty["faults"]) == (0, 1)
    assert (quiet["members"], quiet["rounds"] > 3) == (3.0, True)
    assert faulty["tokens"] > 0
    assert faulty["members"] < 3.0
    assert len(faulty["commit_s"]) == 1
    assert len(faulty["return_s"]) == 1
