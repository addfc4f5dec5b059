"""Files of lines: whole lines come back, torn ones are cut off, full ones are rotated, no disk problem is raised."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from peer.telemetry.lines import BLOCK_BYTES, LinesFile, rotated


def fill(path: Path, *lines: bytes, max_bytes: int | None = None, keep: int = 0) -> None:
    file = LinesFile(path, max_bytes, keep)
    for line in lines:
        file.append(line)
    file.close()


def test_a_file_is_continued(tmp_path: Path) -> None:
    fill(tmp_path / "x.jsonl", b"one")
    fill(tmp_path / "x.jsonl", b"two")
    assert (tmp_path / "x.jsonl").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("torn", [b"tw", b"t" * (2 * BLOCK_BYTES)])
@pytest.mark.parametrize("whole", [b"", b"one\n"])
def test_what_a_crash_left_of_a_line_is_cut_off_when_the_next_comes(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(whole + torn)
    file = LinesFile(path)
    assert path.read_bytes() == whole + torn
    file.append(b"three")
    assert path.read_bytes() == whole + b"three\n"


def test_full_files_are_numbered_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    fill(path, *(b"%03d" % number for number in range(9)), max_bytes=8, keep=2)
    assert [older.name for older in rotated(path)] == ["x.3.jsonl", "x.4.jsonl"]
    assert [older.read_bytes() for older in rotated(path)] == [b"004\n005\n", b"006\n007\n"]
    assert path.read_bytes() == b"008\n"


def test_rotation_goes_on_behind_the_highest_number_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for name in ("x.9.jsonl", "x.10.jsonl", "x.old.jsonl", "x.jsonl"):
        (tmp_path / name).write_bytes(b"12345678\n")
    fill(path, b"new", max_bytes=10, keep=2)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["x.10.jsonl", "x.11.jsonl", "x.jsonl", "x.old.jsonl"]


def test_a_line_larger_than_the_limit_gets_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    fill(path, b"a", b"b" * 50, b"c", max_bytes=8, keep=5)
    assert [older.read_bytes() for older in [*rotated(path), path]] == [b"a\n", b"b" * 50 + b"\n", b"c\n"]


def test_a_torn_line_is_not_rotated_along(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1234567\nto")
    fill(path, b"new", max_bytes=9, keep=1)
    assert (tmp_path / "x.1.jsonl").read_bytes() == b"1234567\n"
    assert path.read_bytes() == b"new\n"


def test_where_rotation_fails_the_file_grows_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_path: Path, _target: Path) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    fill(tmp_path / "x.jsonl", b"1234567", b"2", b"3", max_bytes=8, keep=1)
    assert (tmp_path / "x.jsonl").read_bytes() == b"1234567\n2\n3\n"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_after_a_full_disk_the_next_line_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    file = LinesFile(path)
    file.append(b"one")
    write = os.write

    def part_then_full(descriptor: int, data: bytes) -> int:
        write(descriptor, data[:2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", part_then_full)
        file.append(b"two")
    file.append(b"three")
    assert path.read_bytes() == b"one\nthree\n"
