"""Files of lines that survive crashes: whole lines only, appended as they come, rotated before they grow too large."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)
BLOCK_BYTES = 64 * 1024


class LinesFile:
    """An append-only file of lines with one writer. What a crash left of a last line is cut off before the next.

    A line is in the kernel's hands when `append` returns, so that it survives the death of this process; a power
    failure may take the last seconds.

    Args:
        path: created if absent, else continued.
        max_bytes: a file that would grow larger becomes `name.1.suffix`, `name.2.suffix`, ...; None: never.
        keep: how many of those stay.

    Raises:
        OSError: the file cannot be opened. Later problems, such as a full disk, are logged once and never raised.
    """

    def __init__(self, path: Path, max_bytes: int | None = None, keep: int = 0) -> None:
        self.path, self._max_bytes, self._keep = path, max_bytes, keep
        self._warned = self._torn = False
        self._take(_open(path))

    def append(self, line: bytes) -> None:
        """Append one line, given without its end."""
        assert b"\n" not in line
        data = line + b"\n"
        if self._max_bytes is not None and self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        try:
            if self._torn:
                os.ftruncate(self._descriptor, self._size)
            self._torn = True
            self._torn = os.write(self._descriptor, data) < len(data)
        except OSError as error:
            self._warn(error)
        if not self._torn:
            self._size += len(data)

    def close(self) -> None:
        os.close(self._descriptor)

    def _take(self, descriptor: int) -> None:
        length = os.fstat(descriptor).st_size
        self._descriptor, self._size = descriptor, _whole_bytes(descriptor, length)
        self._torn = self._size < length

    def _rotate(self) -> None:
        """Give the file its number; the new one exists before an old one goes, so that no reader confuses the two."""
        older = rotated(self.path)
        number = 1 + (_number(older[-1]) if older else 0)
        aside = self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")
        before = self._descriptor
        try:
            if self._torn:
                os.ftruncate(before, self._size)
            self.path.rename(aside)
            self._take(_open(self.path))
            os.close(before)
            for path in [*older, aside][: len(older) + 1 - self._keep]:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("cannot write %s: %s; it may be incomplete from here on", self.path, error)
        self._warned = True


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def rotated(path: Path) -> list[Path]:
    """The files that `path` has filled before, oldest first."""
    candidates = path.parent.glob(f"{path.stem}.*{path.suffix}")
    return sorted((candidate for candidate in candidates if _number(candidate) > 0), key=_number)


def _number(path: Path) -> int:
    digits = path.stem.rpartition(".")[2]
    return int(digits) if digits.isdecimal() and digits.isascii() else 0


def _whole_bytes(descriptor: int, length: int) -> int:
    """How many of the first `length` bytes are whole lines."""
    end = length
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
