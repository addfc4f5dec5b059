"""Metrics as JSON lines: one object a line, appended as it happens, readable while it grows and after a crash."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peer.printable import printable, printable_lines
from peer.system.clock import Clock
from peer.telemetry.lines import LinesFile, rotated
from peer.telemetry.write_guard import WriteGuard

Follow = Callable[[str, Mapping[str, Any]], None]
REDACTED = "[redacted]"
MAX_MESSAGE_CHARS = 4000
MAX_BYTES = 64 * 2**20  # of one file; two full ones stay
KEEP = 2
# What must never reach a log: hub tokens, PEM private keys, and libp2p Ed25519 keys (base64 of their protobuf header).
_SECRETS = re.compile(
    r"hf_[A-Za-z0-9]{20,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|CAESQ[A-Za-z0-9+/]{80,}=*",
    re.DOTALL,
)


class MetricsFile:
    """An append-only file of events; whole lines only, also after a crash in the middle of one; rotated.

    Args:
        path: created if absent, else continued.
        guard: notes every problem, such as a full disk; none is raised.
        clock: unix seconds, for the field `time` of each event.
        follow: receives each event, too.
    """

    def __init__(
        self, path: Path, guard: WriteGuard | None = None, clock: Clock = time.time, follow: Follow | None = None
    ) -> None:
        self.path = path
        self._clock, self._follow = clock, follow
        self._lines = LinesFile(path, MAX_BYTES, KEEP, guard)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Floats that are not finite become null, since JSON has no word for them."""
        document = {"event": event, "time": self._clock(), **fields}
        self._lines.append(json.dumps(finite_json(document), separators=(",", ":")).encode())
        if self._follow is not None:
            self._follow(event, fields)

    def close(self) -> None:
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole events of a metrics file and those that it has filled before, in order; [] when there is none yet.

    A line that is still being written, or that a crash cut off, is left out.
    """
    lines: list[bytes] = []
    for file in (*rotated(path), path):
        with contextlib.suppress(FileNotFoundError):
            lines += file.read_bytes().split(b"\n")
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events


class PlainLog(logging.Formatter):
    """Log lines for people: without secrets, and without characters that a terminal would obey."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, MAX_MESSAGE_CHARS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei), MAX_MESSAGE_CHARS)

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class JsonLog(logging.Formatter):
    """Log records as JSON lines: time (unix seconds), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "event": "log",
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable_lines(redact(record.getMessage()), MAX_MESSAGE_CHARS),
        }
        if record.exc_info:
            document["traceback"] = printable_lines(redact(self.formatException(record.exc_info)), MAX_MESSAGE_CHARS)
        return json.dumps(document, separators=(",", ":"))


def redact(text: str) -> str:
    """The text without private keys and access tokens."""
    return _SECRETS.sub(REDACTED, text)


def finite_json(value: Any) -> Any:
    """The document with null for every float that is not finite: JSON has no word for those."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return value
