"""Files of lines that survive crashes: whole lines only, appended as they come, rotated before they grow too large."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from peer.telemetry.write_guard import WriteGuard

BLOCK_BYTES = 64 * 1024


class LinesFile:
    """An append-only file of lines with one writer. What a crash left of a last line is cut off before the next.

    A line is in the kernel's hands when `append` returns, so that it survives the death of this process; a power
    failure may take the last seconds.

    Args:
        path: created if absent, else continued.
        max_bytes: a file that would grow larger becomes `name.1.suffix`, `name.2.suffix`, ...; None: never.
        keep: how many of those stay.
        guard: notes every problem, such as a full disk; none is raised. A line that fails is lost.
    """

    def __init__(
        self, path: Path, max_bytes: int | None = None, keep: int = 0, guard: WriteGuard | None = None
    ) -> None:
        self.path, self._max_bytes, self._keep = path, max_bytes, keep
        self._guard = guard or WriteGuard()
        self._descriptor: int | None = None
        self._size, self._torn = 0, False
        with self._guard.writing(str(path)):
            self._take(_open(path))

    def append(self, line: bytes) -> None:
        """Append one line, or some that belong together, given without the last end."""
        data = line + b"\n"
        with self._guard.writing(str(self.path)):
            if self._descriptor is None:
                self._take(_open(self.path))
            if self._max_bytes is not None and self._size and self._size + len(data) > self._max_bytes:
                self._rotate()
            self._write(data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
        self._torn = True
        if os.write(self._descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._torn = False
        self._size += len(data)

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
        assert before is not None
        with self._guard.writing(f"{self.path} (its rotation)"):
            if self._torn:
                os.ftruncate(before, self._size)
            self.path.rename(aside)
            self._take(_open(self.path))
            os.close(before)
            for path in [*older, aside][: len(older) + 1 - self._keep]:
                path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


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
