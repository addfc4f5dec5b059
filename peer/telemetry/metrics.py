"""Metrics as JSON lines: one object a line, appended as it happens, readable while it grows and after a crash."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

REDACTED = "[redacted]"
# What must never reach a log: hub tokens, PEM private keys, and libp2p Ed25519 keys (base64 of their protobuf header).
_SECRETS = re.compile(
    r"hf_[A-Za-z0-9]{20,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|CAESQ[A-Za-z0-9+/]{80,}=*",
    re.DOTALL,
)


class MetricsFile:
    """An append-only file of events; whole lines only, also after a crash in the middle of one.

    Args:
        path: created if absent, else continued.
        clock: unix seconds, for the field `time` of each event.

    Raises:
        OSError: the file cannot be opened. Later problems, such as a full disk, are logged once and never raised.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = _ends_torn(path)
        self._warned = False

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Floats that are not finite become null, since JSON has no word for them."""
        document = {"event": event, "time": self._clock(), **fields}
        line = json.dumps(_finite(document), separators=(",", ":")).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            self._torn = os.write(self._descriptor, line) < len(line)
        except OSError as error:
            if not self._warned:
                log.warning("cannot write %s: %s; metrics may be incomplete from here on", self.path, error)
            self._warned = True

    def close(self) -> None:
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole events of a metrics file in order; [] when there is no file yet.

    A line that is still being written, or that a crash cut off, is left out.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
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
    """Log lines for people, without secrets."""

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
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            document["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(document, separators=(",", ":"))


def redact(text: str) -> str:
    """The text without private keys and access tokens."""
    return _SECRETS.sub(REDACTED, text)


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
