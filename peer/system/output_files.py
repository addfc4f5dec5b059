"""Files and folders that a person names for results: checked before the work, made without leftovers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from peer.errors import UserError


def named_path(text: str | Path) -> Path:
    """A path as a person gives it: `~` is a home folder.

    Raises:
        ValueError: no such home folder, or a character that no path has.
    """
    if "\0" in str(text):
        raise ValueError("a path cannot have the character NUL")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def check_output_file(path: Path, flag: str, coming: Path | None = None) -> None:
    """Say before the work, not after hours, that a file cannot be written. Nothing is left behind.

    Args:
        flag: names it in messages.
        coming: a folder that is made later; a file right inside is fine where the folder is.

    Raises:
        UserError: it is a folder, its folder is not there, or the system refuses.
    """
    try:
        _check_file(Path(os.path.realpath(path)), coming)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{flag}={path}: cannot be written: {reason}", "Choose another file.") from None


def check_output_folder(path: Path) -> None:
    """Check that a folder can be written to, or made. Nothing is made.

    Raises:
        OSError: the reason.
    """
    folder = Path(os.path.realpath(path))
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"\0")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, all or none.

    Raises:
        OSError: the reason.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        for folder in missing:
            if os.path.isdir(folder):
                folder.rmdir()
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, and a failure leaves the old one alone.

    It is not flushed to the disk. A device or a pipe is written to as it is, and of a link, what it points to.

    Raises:
        OSError: the reason.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    temporary = target.with_name(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _check_file(target: Path, coming: Path | None) -> None:
    if target.is_dir():
        raise OSError(0, "it is a folder")
    if target.exists():
        with target.open("r+b" if target.is_file() else "wb"):  # neither changes an existing file
            pass
        if not target.is_file():
            return
    folder = target.parent
    if not folder.exists() and (coming is None or folder != Path(os.path.realpath(coming))):
        raise OSError(0, f"there is no folder {folder}")
    check_output_folder(folder)
