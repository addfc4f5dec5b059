"""A trouble is told once, whatever it hits, and once more when it is over."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from peer.telemetry.console import setup_logging
from peer.telemetry.lines import LinesFile
from peer.telemetry.write_guard import WriteGuard
from tests.telemetry.test_console import terminal


def fail(guard: WriteGuard, what: str, number: int) -> None:
    with guard.writing(what):
        raise OSError(number, os.strerror(number), what)


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_one_warning_for_a_kind_and_a_word_when_all_of_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    guard = WriteGuard()
    for what in ("a", "b", "a"):
        fail(guard, what, errno.ENOSPC)
    fail(guard, "b", errno.EROFS)
    assert levels(caplog) == [logging.WARNING, logging.WARNING]
    assert "cannot write a: No space left on device." in caplog.messages[0]
    assert "cannot write b: Read-only file system." in caplog.messages[1]
    with guard.writing("a"):
        pass
    assert len(caplog.records) == 2
    with guard.writing("b"):
        pass
    assert levels(caplog)[2:] == [logging.INFO, logging.INFO]
    fail(guard, "a", errno.ENOSPC)
    assert levels(caplog)[4:] == [logging.WARNING]


def test_the_kind_is_that_of_the_cause() -> None:
    guard = WriteGuard()
    fail(guard, "a", errno.ENOSPC)
    of_ours = ValueError("checkpoint-7")
    of_ours.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert not guard.failed("checkpoints", of_ours)
    of_rust = ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert not guard.failed("checkpoints", of_rust)
    assert guard.failed("checkpoints", ValueError("something else"))


def test_a_bug_goes_on_its_way() -> None:
    with pytest.raises(ZeroDivisionError), WriteGuard().writing("a"):
        raise ZeroDivisionError


def test_a_file_that_cannot_be_opened_is_opened_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LinesFile(tmp_path / "later" / "x.jsonl")
    file.append(b"lost")
    (tmp_path / "later").mkdir()
    file.append(b"kept")
    assert (tmp_path / "later" / "x.jsonl").read_bytes() == b"kept\n"
    assert levels(caplog) == [logging.WARNING, logging.INFO]


def test_a_log_that_cannot_be_written_is_one_warning_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = terminal()
    setup_logging(tmp_path / "peer.log", "info", False, console)
    log, write = logging.getLogger("peer.x"), os.write

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.info("one")
        log.info("two")
    assert os.write is write
    log.info("three\nlines")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("No space left on device.") == 1
    kept = (tmp_path / "peer.log").read_text().splitlines()
    assert [line.rsplit("peer.x: ")[-1] for line in kept[:1]] == ["three lines"]
    assert "is written again" in kept[1]
    assert capsys.readouterr().err == ""


def test_a_console_that_is_gone_is_one_warning_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = terminal()

    def gone(_: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    console.file.write = gone  # type: ignore[method-assign]
    setup_logging(tmp_path / "peer.log", "info", False, console)
    for _ in range(3):
        logging.getLogger("peer.x").info("hello")
    assert (tmp_path / "peer.log").read_text().count("cannot write the console: Broken pipe") == 1
    assert (tmp_path / "peer.log").read_text().count("hello") == 3
    assert capsys.readouterr().err == ""
