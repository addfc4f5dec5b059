"""Failures of logs, figures and checkpoints never stop the training: each kind is logged once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
_OF_SAFETENSORS = re.compile(r"(No space left on device|[A-Z][a-z ]+) \(os error \d+\)")


class WriteGuard:
    """One warning for each kind of trouble, and a word when what had failed can be written again.

    A full disk is one trouble, however many files lie on it: a failure whose reason was logged already is
    silent. One guard serves a whole process, from any thread.
    """

    def __init__(self) -> None:
        self._failing: dict[str, set[str]] = {}  # reason -> what fails for it

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Do what is inside; an OSError there is logged once and goes no further."""
        try:
            yield
        except OSError as error:
            self.failed(what, error)
        else:
            self.worked(what)

    def failed(self, what: str, error: Exception, text: str | None = None) -> bool:
        """Note a failure.

        Args:
            what: is written, the same words each time.
            text: for the log, in place of `cannot write WHAT: ERROR`.

        Returns:
            whether its kind is new, and a warning was logged.
        """
        reason = _reason(error)
        new = reason not in self._failing
        self._failing.setdefault(reason, set()).add(what)
        if new:
            text = text or f"cannot write {what}: {reason}"
            log.warning("%s. Everything else continues; failed logs, figures and checkpoints are retried", text)
        return new

    def worked(self, what: str) -> None:
        """It was written."""
        for reason, failing in list(self._failing.items()):
            failing.discard(what)
            if not failing and self._failing.pop(reason, None) is not None:
                log.info("all that failed is written again, %s last (it was: %s)", what, reason)


def _reason(error: BaseException) -> str:
    """The system's word for it, without the path, also where another error was made of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.strerror if isinstance(error, OSError) else None
    wrapped = _OF_SAFETENSORS.search(str(error))
    return text or (wrapped[1] if wrapped else str(error)) or type(error).__name__
