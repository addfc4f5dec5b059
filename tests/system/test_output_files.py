"""Files that a person names are checked before the work, and are whole or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peer.errors import UserError
from peer.system.output_files import check_output_file, make_folder, named_path, replace_file

LONG = "x" * 300


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/report.json", "there is no folder"), ("folder", "it is a folder"), (LONG, "File name too long"),
        ("file/report.json", "Not a directory"), ("/proc/report.json", "No such file"), ("/proc/version", ""),
        (f"{LONG}/report.json", "File name too long"), ("loose/report.json", "there is no folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_said_and_nothing_is_made(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loose").symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    with pytest.raises(UserError) as refused:
        check_output_file(tmp_path / name, "--report")
    assert refused.value.what.startswith(f"--report={tmp_path / name}: cannot be written: {reason}")
    assert refused.value.hint == "Choose another file."
    assert tree(tmp_path) == before


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "old.json")
    for name in ("old.json", "link.json", "new.json", "x" * 255, "/dev/null"):
        check_output_file(tmp_path / name, "--report")
    check_output_file(tmp_path / "coming" / "report.json", "--report", tmp_path / "coming")
    assert tree(tmp_path) == ["link.json", "old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_folder_that_comes_must_be_possible(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        check_output_file(Path("/proc/coming/report.json"), "--report", Path("/proc/coming"))
    with pytest.raises(UserError, match="there is no folder"):
        check_output_file(tmp_path / "coming/deeper/report.json", "--report", tmp_path / "coming")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("x" * 255)
    replace_file(path, b"one")
    link = tmp_path / "link"
    link.symlink_to(path)
    replace_file(link, b"two")
    assert (link.is_symlink(), path.read_bytes()) == (True, b"two")

    def full(_: Path, __: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            replace_file(path, b"three")
    assert path.read_bytes() == b"two"
    assert len(tree(tmp_path)) == 2


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_file(tmp_path / "pipe", b"figures")
    assert os.read(reader, 100) == b"figures"
    os.close(reader)
    assert tree(tmp_path) == ["pipe"]


def test_folders_are_made_all_or_none(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    with pytest.raises(OSError, match="too long"):
        make_folder(tmp_path / "c" / "d" / LONG)
    assert tree(tmp_path) == ["a", "a/b"]


def test_names_that_are_no_paths() -> None:
    assert named_path("~/x") == Path.home() / "x"
    for text in ("~nobody-of-that-name/x", "a\0b"):
        with pytest.raises(ValueError, match=r"home|NUL"):
            named_path(text)
