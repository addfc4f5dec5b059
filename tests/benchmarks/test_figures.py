"""The statistics and the report that all benchmarks share."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from benchmarks.figures import BenchReport, Figure, describe_machine, fit_line, median, quantile
from benchmarks.processes import parse_pss
from benchmarks.table import page


def test_quantiles_lie_between_the_ordered_neighbours() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0]) == 2.5
    assert quantile([5.0, 1.0, 2.0, 3.0, 4.0], 0.9) == pytest.approx(4.6)
    assert quantile([7.0], 0.9) == 7.0


def test_a_line_is_found_again() -> None:
    x = [0.8e6, 10e6, 50e6]
    slope, intercept = fit_line(x, [12.0 * value + 350e6 for value in x])
    assert slope == pytest.approx(12.0)
    assert intercept == pytest.approx(350e6)


def test_a_limit_can_be_a_ceiling_or_a_floor() -> None:
    assert Figure(name="seconds", value=15.0, unit="s", limit=15.0).met is True
    assert Figure(name="seconds", value=15.1, unit="s", limit=15.0).met is False
    assert Figure(name="ratio", value=0.94, unit="x", limit=0.95, at_most=False).met is False
    assert Figure(name="ratio", value=0.94, unit="x").met is None
    assert Figure(name="ratio", value=0.94, unit="x", limit=0.95, at_most=False).target == ">= 0.95 x"


def test_a_report_is_json_and_names_no_machine() -> None:
    figure = Figure(name="ratio", value=0.97, unit="x", limit=0.95, at_most=False)
    report = BenchReport(name="loop", about="One against another", seed=3, figures=(figure,), samples={"a": [1.0]})
    document = json.loads(json.dumps(report.to_dict()))
    assert document["command"] == "python -m benchmarks.loop"
    assert document["seed"] == 3
    assert document["samples"] == {"a": [1.0]}
    expected = {"name": "ratio", "value": 0.97, "unit": "x", "limit": 0.95, "target": ">= 0.95 x", "met": True}
    assert document["figures"] == [expected]
    text = json.dumps(describe_machine())
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text


def test_the_page_shows_every_figure_with_its_command() -> None:
    figure = Figure(name="ratio", value=0.9, unit="x", limit=0.95, at_most=False)
    machine = describe_machine()
    report = BenchReport(
        name="loop", about="One against another", seed=3, figures=(figure,), samples={}, machine=machine
    )
    text = page({report.name: report.to_dict()})
    assert "    python -m benchmarks.loop" in text.splitlines()
    assert "| ratio | 0.9 x | >= 0.95 x | **no** |" in text.splitlines()


def test_the_proportional_set_size_is_read_in_bytes() -> None:
    rollup = "00400000-7fff [rollup]\nRss:     900 kB\nPss:     300 kB\nPss_Dirty:   10 kB\n"
    assert parse_pss(rollup) == 300 * 1024
