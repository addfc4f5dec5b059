"""Recorded folders -> the report, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.demo.picture import draw
from peer.demo.report import Observed, demo_report, observe, shortcomings
from peer.demo.run import summary
from tests.demo.recorded import Recorder

KILLED = {"bravo": 117.0}
REPORT_KEYS = {
    "rounds", "val_loss_first", "val_loss_last", "tokens", "wire_bytes_per_parameter_per_round", "export_path",
    "events", "peers",
}
PEER_KEYS = {
    "id", "nickname", "joined_at_round", "left_at_round", "tokens", "bytes_sent", "bytes_received", "seconds_waiting",
    "seconds_training", "lineage_id", "state_digest",
}


@pytest.fixture
def peers(tmp_path: Path) -> list[Observed]:
    """alpha: 9 rounds, an abort and a lonely try; bravo: killed after round 2; delta: joins at round 5."""
    alpha, bravo, delta = (Recorder(tmp_path, name) for name in ("alpha", "bravo", "delta"))
    alpha.start()
    alpha.validation(0, 5.5)
    alpha.now = 105.0
    alpha.round(1, "aborted", alone=True, phase="match", reason="nobody")
    alpha.round(1, "aborted", bytes_sent=900, phase="exchange", reason="bravo is slow")
    for number in range(1, 10):
        alpha.now = 110.0 + number
        alpha.round(number, bytes_sent=1400)
        alpha.step(5.0 / number, 1000 * number)
    alpha.validation(9, 2.5)
    alpha.report(9)
    bravo.start()
    bravo.validation(0, 5.5)
    bravo.round(1, bytes_sent=1500)
    bravo.now = 112.0
    bravo.round(2, bytes_sent=1700)
    bravo.now = 116.0
    bravo.step(None, 2000)
    bravo.status(tokens=2100, seconds_waiting=4.0)
    delta.now = 115.5
    delta.start(5)
    delta.round(6, "caught_up", bytes_sent=0)
    delta.round(7, bytes_sent=1000)
    delta.report(9, joined_at_round=5, tokens=4000)
    return [observe(name, tmp_path / name) for name in ("alpha", "bravo", "delta")]


def test_figures(peers: list[Observed], tmp_path: Path) -> None:
    report = demo_report(peers, KILLED)
    assert set(report) == REPORT_KEYS
    assert report["rounds"] == 9
    assert (report["val_loss_first"], report["val_loss_last"]) == (5.5, 2.5)
    assert report["tokens"] == 9000 + 2100 + 4000
    assert report["wire_bytes_per_parameter_per_round"] == (1500 + 1700) / 2 / 1000
    assert report["export_path"] == str(tmp_path / "alpha" / "export")


def test_events_in_order_of_time(peers: list[Observed]) -> None:
    assert demo_report(peers, KILLED)["events"] == [
        {"time": 100.0, "kind": "join", "peer": "alpha", "round": 0, "reason": None},
        {"time": 100.0, "kind": "join", "peer": "bravo", "round": 0, "reason": None},
        {"time": 105.0, "kind": "abort", "peer": "alpha", "round": 1, "reason": "exchange: bravo is slow"},
        {"time": 115.5, "kind": "join", "peer": "delta", "round": 5, "reason": None},
        {"time": 117.0, "kind": "kill", "peer": "bravo", "round": 2, "reason": "SIGKILL"},
    ]


def test_a_survivor_is_listed_as_it_reports_itself(peers: list[Observed]) -> None:
    alpha = demo_report(peers, KILLED)["peers"][0]
    assert alpha == {
        "id": "id-alpha", "nickname": "alpha", "joined_at_round": 0, "left_at_round": None, "tokens": 9000,
        "bytes_sent": 111, "bytes_received": 222, "seconds_waiting": 1.5, "seconds_training": 30.25,
        "lineage_id": "a" * 64, "state_digest": "b" * 64,
    }


def test_the_killed_peer_is_listed_with_what_it_last_said(peers: list[Observed]) -> None:
    entries = demo_report(peers, KILLED)["peers"]
    assert all(set(entry) == PEER_KEYS for entry in entries)
    assert entries[1] == {
        "id": "id-bravo", "nickname": "bravo", "joined_at_round": 0, "left_at_round": 2, "tokens": 2100,
        "bytes_sent": 3200, "bytes_received": 6400, "seconds_waiting": 4.0, "seconds_training": 12.0,
        "lineage_id": f"{2:064x}", "state_digest": f"{258:064x}",
    }


def test_a_peer_killed_before_it_said_anything_is_listed_with_zeros(peers: list[Observed]) -> None:
    entry = demo_report([*peers, Observed(nickname="echo")], {"echo": 118.0})["peers"][3]
    assert (entry["id"], entry["tokens"], entry["left_at_round"], entry["state_digest"]) == (None, 0, 0, None)


def test_all_went_well(peers: list[Observed]) -> None:
    assert shortcomings(demo_report(peers, KILLED), 9) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rounds": 8}, "the swarm made 8 rounds, not 9"),
        ({"val_loss_last": 5.5}, "the validation loss did not fall: 5.5 -> 5.5"),
        ({"val_loss_last": None}, "the validation loss did not fall: 5.5 -> None"),
        ({"events": [{"kind": "join"}]}, "no peer was seen to kill"),
    ],
)
def test_what_did_not_go_well_is_said(peers: list[Observed], changes: dict[str, Any], problem: str) -> None:
    assert shortcomings({**demo_report(peers, KILLED), **changes}, 9) == [problem]


def test_different_digests_are_a_failure_but_the_killed_one_does_not_count(peers: list[Observed]) -> None:
    report = demo_report(peers, KILLED)
    report["peers"][2]["state_digest"] = "c" * 64
    assert shortcomings(report, 9) == [f"the peers' states differ: alpha {'b' * 12}, delta {'c' * 12}"]
    report["peers"][0]["state_digest"] = report["peers"][2]["state_digest"] = None
    assert len(shortcomings(report, 9)) == 1


def test_summary_for_a_person(peers: list[Observed]) -> None:
    lines = summary(demo_report(peers, KILLED), "def f():\n    pass", Path("runs/demo")).splitlines()
    assert lines[:4] == [
        "rounds            9",
        "validation loss   5.500 -> 2.500  (-54.5%)",
        "tokens            15,100 by 3 peers",
        "traffic           1.60 bytes sent per parameter and round",
    ]
    assert lines[4:8] == [
        "events            alpha gave up round 1 (exchange: bravo is slow)",
        "                  delta joined at round 5",
        "                  bravo was killed after round 2 (SIGKILL)",
        f"state             equal on all survivors: {'b' * 16}",
    ]
    assert lines[-2:] == ["  | def f():", "  |     pass"]


def test_the_picture_is_drawn_from_the_same_folders(peers: list[Observed], tmp_path: Path) -> None:
    draw(tmp_path / "loss.png", peers, KILLED)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
