"""Options and environment of the demo, and what happens when it cannot go on; the swarm itself is in tests/network."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.demo import run
from peer.demo.play import DemoError, Play
from peer.demo.run import DemoOptions, add_demo_flags, child_environment, run_demo, run_demo_command
from peer.errors import UserError


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_flags_become_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_demo_flags(parser)
    seen: list[DemoOptions] = []

    def record(options: DemoOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(run, "run_demo", record)
    assert run_demo_command(parser.parse_args([])) == 0
    flags = ["--report", "r.json", "--output-dir", str(tmp_path), "--rounds", "9", "--seconds-limit", "60"]
    run_demo_command(parser.parse_args([*flags, "--seed", "3", "--json"]))
    assert seen == [
        DemoOptions(),
        DemoOptions(
            output_dir=tmp_path, report=Path("r.json"), rounds=9, seconds_limit=60.0, seed=3, json_lines=True
        ),
    ]


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--rounds=7", {"rounds": 7}),
        ("--seconds-limit=0", {"seconds_limit": 0.0}),
        ("--seconds-limit=nan", {"seconds_limit": float("nan")}),
        ("--seed=-1", {"seed": -1}),
    ],
)
def test_values_out_of_range_are_refused(flag: str, options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=flag):
        DemoOptions(**options)  # type: ignore[arg-type]


def test_a_report_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        run_demo(DemoOptions(output_dir=tmp_path / "demo", report=tmp_path))
    assert not (tmp_path / "demo").exists()


def test_children_see_no_settings_meant_for_others() -> None:
    environment = child_environment({"PATH": "/bin", "ATOLL_NICKNAME": "x"})
    assert environment["PATH"] == "/bin"
    assert "ATOLL_NICKNAME" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_exit_code_130_and_names_the_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(Play, "run", lambda _: os.kill(os.getpid(), number))
    assert run_demo(DemoOptions(output_dir=tmp_path / "demo")) == 130
    assert f"interrupted; the logs are in {tmp_path / 'demo'}" in capsys.readouterr().out
    assert signal.getsignal(number) is before


def test_a_death_is_exit_code_1_with_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(_: Play) -> None:
        raise DemoError("alpha ended unexpectedly (exit code 1)", "Traceback\nValueError: x")

    monkeypatch.setattr(Play, "run", die)
    assert run_demo(DemoOptions(output_dir=tmp_path / "demo", json_lines=True)) == 1
    message = json.loads(capsys.readouterr().out.splitlines()[-1])["message"]
    told = "demo: alpha ended unexpectedly (exit code 1)\nthe last lines of its log:\n  Traceback\n  ValueError: x\n"
    assert message.startswith(told)
