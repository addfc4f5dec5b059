"""Metrics files: whole events come back, torn ones do not, and no disk problem reaches the training loop."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from peer.telemetry.metrics import JsonLog, MetricsFile, PlainLog, read_metrics, redact


def metrics(path: Path) -> MetricsFile:
    return MetricsFile(path, clock=lambda: 12.5)


def test_events_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    file = metrics(tmp_path / "m.jsonl")
    file.write("start", peer_id="12D3", round=0)
    file.write("step", step=10, loss=2.5)
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"event": "start", "time": 12.5, "peer_id": "12D3", "round": 0},
        {"event": "step", "time": 12.5, "step": 10, "loss": 2.5},
    ]


def test_a_torn_last_line_is_left_out_and_the_next_event_survives_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"event":"step","step":1}\n{"event":"step","st')
    assert [event["step"] for event in read_metrics(path)] == [1]
    metrics(path).write("step", step=3)
    assert [event["step"] for event in read_metrics(path)] == [1, 3]


def test_no_file_and_foreign_lines_are_no_events(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(b'7\n[]\n{"step":1}\n{"event":3}\n\xff\xfe\n')
    assert read_metrics(path) == []


def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path: Path) -> None:
    file = metrics(tmp_path / "m.jsonl")
    file.write("step", loss=float("nan"), more={"a": [float("inf"), 1.0]})
    assert read_metrics(tmp_path / "m.jsonl")[0]["loss"] is None
    assert read_metrics(tmp_path / "m.jsonl")[0]["more"] == {"a": [None, 1.0]}


def test_a_full_disk_warns_once_and_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = metrics(tmp_path / "m.jsonl")

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        file.write("step", step=1)
        file.write("step", step=2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
    file.write("step", step=3)
    assert [event["step"] for event in read_metrics(tmp_path / "m.jsonl")] == [3]


def test_a_line_that_was_cut_by_the_disk_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = metrics(tmp_path / "m.jsonl")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        file.write("step", step=1)
    file.write("step", step=2)
    assert [event["step"] for event in read_metrics(tmp_path / "m.jsonl")] == [2]


def test_json_log_is_one_object_with_the_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord("peer.x", logging.ERROR, __file__, 1, "two\n%s", ("lines",), None)
        record.exc_info = (type(error), error, error.__traceback__)
    document = json.loads(JsonLog().format(record))
    assert document["level"] == "error"
    assert document["logger"] == "peer.x"
    assert document["message"] == "two\nlines"
    assert document["traceback"].endswith("ValueError: broken")
    assert "\n" not in JsonLog().format(record)


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 11,
        "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2Vw\n-----END PRIVATE KEY-----",
        "CAESQ" + "x" * 86 + "==",
    ],
)
def test_keys_and_tokens_never_reach_a_log(secret: str) -> None:
    assert redact(f"a {secret} b") == "a [redacted] b"
    record = logging.LogRecord("peer", logging.INFO, __file__, 1, "key %s", (secret,), None)
    assert PlainLog("%(message)s").format(record) == "key [redacted]"
    assert json.loads(JsonLog().format(record))["message"] == "key [redacted]"


def test_digests_and_peer_ids_are_not_mistaken_for_keys() -> None:
    text = "run " + "0f" * 32 + " peer 12D3KooWHRUVspBZKs3PY6co1mGsRLC28DvSJkpQorrGE5LRRBt9"
    assert redact(text) == text
