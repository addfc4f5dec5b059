"""What `benchmarks.hours` makes of its swarms."""

from __future__ import annotations

import json

import pytest

from benchmarks import hours
from benchmarks.figures import run_benchmark
from tests.swarm.machines import Outcome


def test_the_worst_of_all_swarms_counts(tmp_path, monkeypatch):
    outcomes = {
        1: Outcome(rounds=50, shares=[1.0, 0.9], faults=3, refused_s=20.0, pause_s=78.0, pause_at_s=9.0, healed_s=60.0),
        2: Outcome(rounds=49, shares=[0.8, 1.0], faults=4, refused_s=0.0, pause_s=312.0, pause_at_s=7.0, healed_s=None),
    }
    monkeypatch.setattr(hours, "play", lambda _programme, seed, _hours, _log: outcomes[seed])
    report = tmp_path / "hours.json"
    command = ["hours", "--seed", "1", "--swarms", "2", "--hours", "3", "--programmes", "pair", "--report", str(report)]
    monkeypatch.setattr("sys.argv", command)
    run_benchmark(hours.build_parser(), hours.measure)
    found = json.loads(report.read_text())
    (row,) = found["rows"]
    assert (row["rounds"], row["faults"], row["refused_s"], row["share"], row["hours"]) == (99, 7, 20.0, 0.8, 6.0)
    assert (row["pause_s"], row["pause_seed"], row["healed_s"]) == (312.0, 2, None)
    assert row["pause"] == pytest.approx(2.0)  # 1.1 * 60 + 2 * 30 + 30 s are allowed
    assert [figure["met"] for figure in found["figures"]] == [False, None, False, None]
    assert found["command"] == "python -m benchmarks.hours --programmes pair --swarms 2 --hours 3"
