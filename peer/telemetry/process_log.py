"""The log of a long-lived network process: printable, without secrets, and bounded whatever strangers send."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from peer.system.clock import Clock
from peer.telemetry.metrics import PlainLog

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_BYTES = 8 * 2**20  # with the one before, 16 MiB
CHECK_EVERY = 64  # records
REPEAT_S = 600.0  # until the same words are logged again
WINDOW_S, MAX_IN_WINDOW = 60.0, 10  # warnings of one kind
MAX_KINDS, MAX_TEXTS = 512, 1024


@dataclass
class _WarningKind:
    """Warnings from one line of the code. `left_out`: since one was logged."""

    began: float
    logged: int = 0
    left_out: int = 0


class WarningLimit(logging.Filter):
    """Lets a warning through once in ten minutes, and ten of one kind in a minute; says how many it left out."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, str], _WarningKind] = OrderedDict()
        self._texts: OrderedDict[int, float] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now, text = self._clock(), record.getMessage()
        kind = self._kinds.setdefault((record.name, str(record.msg)), _WarningKind(now))
        self._kinds.move_to_end((record.name, str(record.msg)))
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        if now - kind.began > WINDOW_S:
            kind.began, kind.logged = now, 0
        last = self._texts.get(hash(text))
        if kind.logged >= MAX_IN_WINDOW or (last is not None and now - last < REPEAT_S):
            kind.left_out += 1
            return False
        kind.logged += 1
        self._texts[hash(text)] = now
        if len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)
        if kind.left_out:
            record.msg, record.args = f"{text} ({kind.left_out} more such warnings were left out)", None
            kind.left_out = 0
        return True


class StderrLog(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error. A file behind it that only this process and its children append to stays bounded.

    Args:
        rotates: move what is in the file to `name.1` when it is full; the file is ours, no terminal or pipe.
    """

    def __init__(self, rotates: bool = False, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(sys.stderr)
        self._rotates, self._max_bytes, self._count = rotates, max_bytes, 0
        self.setFormatter(PlainLog(LINE))
        self.addFilter(WarningLimit())

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        if self._rotates and self._count % CHECK_EVERY == 0:
            with contextlib.suppress(OSError, ValueError):
                rotate_appended(self.stream.fileno(), self._max_bytes)
        super().emit(record)


def log_file(path: Path) -> logging.Handler:
    """The same lines in a file of this process alone, which stays bounded; with the one before, 16 MiB."""
    handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1, delay=True)
    handler.setFormatter(PlainLog(LINE))
    handler.addFilter(WarningLimit())
    return handler


def rotate_appended(descriptor: int, max_bytes: int) -> None:
    """Copy a full file to `name.1` beside it and empty it: later writes begin at its start.

    Raises:
        OSError: it cannot be copied; it is left as it is.
    """
    status = os.fstat(descriptor)
    appended = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    if not stat.S_ISREG(status.st_mode) or not appended or status.st_size <= max_bytes:
        return
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    shutil.copyfile(path, f"{path}.1.tmp")
    os.replace(f"{path}.1.tmp", f"{path}.1")
    os.ftruncate(descriptor, 0)
