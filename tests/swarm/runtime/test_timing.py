"""Every duration in one value: the table in the documents shows it, and scaling it scales the protocol."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from peer.swarm.runtime.timing import STANDARD, Timing

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `(\w+_s)` \| (\S+) \| (.*) \|$", re.MULTILINE)
CONSTANT = re.compile(r"^_?[A-Z_]+_S\b.*=", re.MULTILINE)


def durations() -> dict[str, tuple[float, str]]:
    """Value and meaning of each duration, derived ones included, in order."""
    own = {each.name: each.metadata["meaning"] for each in fields(Timing)}
    derived = {name: it.fget.__doc__ or "" for name, it in vars(Timing).items() if isinstance(it, property)}
    return {name: (getattr(STANDARD, name), meaning) for name, meaning in {**own, **derived}.items()}


def test_the_documents_have_the_table_of_all_durations() -> None:
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Timing\n")[1].split("\n## ")[0]
    rows = {name: (float(value), meaning) for name, value, meaning in ROW.findall(section)}
    assert rows == durations()
    assert list(rows) == list(durations())


def test_names_have_their_unit_and_every_duration_a_meaning() -> None:
    assert all(name.endswith("_s") and value > 0.0 and meaning for name, (value, meaning) in durations().items())
    assert len(durations()) == len(fields(Timing)) + 5


def test_no_other_module_of_the_swarm_has_durations_of_its_own() -> None:
    # no durations of the protocol: see where they stand
    elsewhere = {"AGAIN_S", "NO_HURRY_S", "HASHED_PER_S", "LEAST_LINKS_PER_S"}
    found = [
        (path.name, line)
        for path in sorted((ROOT / "peer/swarm").rglob("*.py"))
        for line in CONSTANT.findall(path.read_text(encoding="utf-8"))
        if line.split()[0] not in elsewhere
    ]
    assert found == []


def test_what_others_wait_for_is_sooner_than_they_give_up() -> None:
    """Relations between durations at the two ends of a stream, or of one thing that contains another."""
    assert STANDARD.io_turn_s < STANDARD.frame_timeout_s
    assert STANDARD.preopened_kept_s < STANDARD.first_frame_s
    assert STANDARD.busy_period_s < STANDARD.frame_timeout_s
    assert STANDARD.awake_period_s < STANDARD.probe_timeout_s
    assert STANDARD.leader_silent_s < STANDARD.probe_timeout_s
    assert STANDARD.announce_pause_s < STANDARD.refresh_period_s < STANDARD.fresh_s


def test_it_cannot_be_changed_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        STANDARD.recheck_s = 1.0  # type: ignore[misc]


def test_scaling_scales_all_durations() -> None:
    faster = STANDARD.scaled(0.1)
    for name in durations():
        assert getattr(faster, name) == pytest.approx(0.1 * getattr(STANDARD, name))
    assert STANDARD.scaled(1.0) == STANDARD
