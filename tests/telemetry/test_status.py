"""The status file: whole or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.protocol.records import PeerRecord
from peer.telemetry.status import PeerRow, read_status, write_status
from tests.telemetry.rows import row


def test_rows_come_back_and_the_newest_wins(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_status(path, [row()], "quickstart")
    write_status(path, [row(round=8, loss=None), row(nickname="bravo")], "quickstart")
    assert read_status(path) == [row(round=8, loss=None), row(nickname="bravo")]
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("content", [None, "", '{"run": "x", "pe', "[]", '{"peers": [{"nickname": "alpha"}]}', '"x"'])
def test_absent_or_torn_is_no_rows(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "status.json"
    if content is not None:
        path.write_text(content)
    assert read_status(path) == []


def test_a_record_becomes_a_row() -> None:
    record = PeerRecord(
        run_id="0" * 64, nickname="alpha", state="training", round=7, lineage_id="1" * 64, lineage_weight=5, step=1280,
        tokens=163_840, tokens_per_s=4321.6, loss=2.34567, group_size=3, bytes_sent=1_234_567, bytes_received=987,
        seconds_waiting=12.4, expires_at=1.0,
    )
    assert PeerRow.from_record("12D3KooWalphaXYZ123", record) == row()
