"""The log of a network process stays readable and small whatever strangers send."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.telemetry import process_log
from peer.telemetry.process_log import StderrLog, WarningLimit, log_file, rotate_appended

HOSTILE = "\x1b]0;owned\x07\x1b[2Jname\u202egnp.exe\r\nERROR forged line\x00"


def _record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("peer.x", level, __file__, 1, message, args, None)


def test_a_line_is_one_line_and_no_terminal_obeys_it(capsys):
    handler = StderrLog()
    handler.handle(_record("ignoring a record: %s", HOSTILE))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "ERROR forged line" in line


def test_a_traceback_keeps_its_lines_and_nothing_else():
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    lines = StderrLog().format(record).split("\n")
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)


def test_one_bad_record_is_logged_once_and_then_every_ten_minutes():
    now = [0.0]
    limit = WarningLimit(lambda: now[0])
    passed = []
    for second in range(0, 1300, 2):
        now[0] = float(second)
        record = _record("ignoring a directory record: %s", "malformed")
        if limit.filter(record):
            passed.append((second, record.getMessage()))
    assert [second for second, _ in passed] == [0, 600, 1200]
    assert passed[1][1] == "ignoring a directory record: malformed (299 more such warnings were left out)"


def test_a_thousand_different_bad_records_are_ten_lines_a_minute():
    now = [0.0]
    limit = WarningLimit(lambda: now[0])
    assert sum(limit.filter(_record("ignoring: %s", number)) for number in range(1000)) == 10
    assert limit.filter(_record("another kind"))
    assert limit.filter(_record("ignoring: %s", 5000, level=logging.INFO))
    now[0] = 61.0
    assert limit.filter(_record("ignoring: %s", 5001))


def test_its_memory_is_bounded():
    limit = WarningLimit(lambda: 0.0)
    for number in range(5000):
        limit.filter(_record(f"kind {number}"))
    assert len(limit._kinds) <= 512
    assert len(limit._texts) <= 1024


def test_a_full_log_is_moved_aside_and_all_who_append_go_on(tmp_path):
    path = tmp_path / "agent.log"
    with path.open("ab") as log:
        child = subprocess.Popen(["sh", "-c", "read _; echo child >&2"], stdin=subprocess.PIPE, stderr=log)
        log.write(b"x" * 1000)
        log.flush()
        rotate_appended(log.fileno(), 1000)
        assert path.stat().st_size == 1000
        rotate_appended(log.fileno(), 999)
        assert (path.stat().st_size, (tmp_path / "agent.log.1").stat().st_size) == (0, 1000)
        child.communicate(b"\n")
        log.write(b"more\n")
    assert path.read_bytes() == b"child\nmore\n"


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
def test_a_file_that_is_not_appended_to_is_left_alone(tmp_path: Path, flags: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100)
    descriptor = os.open(path, flags)
    rotate_appended(descriptor, 10)
    os.close(descriptor)
    assert path.stat().st_size == 100


def test_a_log_file_is_private_stays_bounded_and_keeps_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(process_log, "MAX_BYTES", 2000)
    path, before = tmp_path / "node.log", os.umask(0o077)
    try:
        handler = log_file(path)
        for number in range(200):
            handler.handle(_record("line %d of %s", number, HOSTILE, level=logging.INFO))
        handler.close()
    finally:
        os.umask(before)
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "node.log.1"]
    assert all(each.stat().st_size <= 2000 and each.stat().st_mode & 0o077 == 0 for each in tmp_path.iterdir())
    assert "line 199 of" in path.read_text(encoding="utf-8").splitlines()[-1]
    assert all(line.isprintable() for line in path.read_text(encoding="utf-8").splitlines())
