from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.figures import run_benchmark
from benchmarks.groups import GATHERED, PHASES, build_parser, draw, figures, measure


def one_round(seconds: float) -> dict[str, float]:
    return {"round": 1.0, **dict.fromkeys(PHASES, seconds), "total": len(PHASES) * seconds}


def test_figures_are_medians_and_the_limits_are_those_of_a_small_round() -> None:
    rounds = [one_round(seconds) for seconds in (0.01, 0.02, 0.04)]
    found = {figure.name: figure for figure in figures(4, rounds, [0.5, 0.1, 2.0], [0.2, 1.5, 0.3])}
    assert found["4 x 1.0M: round, median"].value == pytest.approx(0.08)
    assert found["4 x 1.0M: round, median"].met is False
    assert found["4 x 1.0M: commit, median"].value == 0.02
    assert found["newcomer in a round with all members, worst"].value == 2.0
    assert found["next round after a kill, median"].value == 0.3
    assert found["next round after a kill, median"].met is True


def test_the_limit_is_for_four_peers() -> None:
    assert figures(3, [one_round(1.0)], [1.0], [1.0])[0].limit is None


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    rounds = [one_round(seconds) for seconds in (0.01, 0.02, 0.04)]
    samples = {"rounds": rounds, **dict.fromkeys(GATHERED, rounds), "newcomers": [1.5, 2.0], "kills": [0.2]}
    draw(tmp_path / "plot.png", 4, samples)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["groups", "--peers", "1"])
    with pytest.raises(SystemExit) as caught:
        run_benchmark(build_parser(), measure)
    assert caught.value.code == 2
    assert "--peers" in capsys.readouterr().err
