"""The benchmark of the page, small: every browser hears every update of a run that goes on."""

from __future__ import annotations

import random

import pytest

from benchmarks import page
from benchmarks.page_server import LOOK_S, SimulatedRun
from peer.explain.swarm_state import SwarmState


def test_updates_reach_all_browsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "WARM_UP_S", 0.5)
    monkeypatch.setattr(page, "SAMPLE_S", 1.5)
    arguments = page.build_parser().parse_args(["--peers", "40", "--browsers", "5", "--minutes", "0.1"])
    report = page.measure(arguments, lambda _: None)
    figures = {figure.name: figure for figure in report.figures}
    assert figures["updates that a browser missed"].value == 0
    assert report.samples["updates"] >= 2 * 5
    assert 0 < figures["update at a browser, median"].value < LOOK_S
    assert figures["memory of the server at the end"].value > 50
    assert report.options == ("--peers", "40", "--period", "10", "--browsers", "5", "--minutes", "0.1")


def test_the_simulated_run_is_one_that_a_reader_understands() -> None:
    now, run = 1.8e9, SimulatedRun(100, 10.0, random.Random(1))
    state = SwarmState(clock=lambda: now)
    serials = []
    for _ in range(20):
        now += LOOK_S
        run.step(now)
        state.take(run.records, run.reports)
        serials.append(sum(record.serial == int(now * 1e6) for record in run.records.values()))
    assert serials == [100] + [20] * 19
    point = state.point()
    assert (point.peers, len(state.peers)) == (100, 100)
    assert 1000 < point.tokens_per_s / 100 < 2000
    assert {event.status for event in state.events} == {"committed"}
    assert len(state.events) >= 4
