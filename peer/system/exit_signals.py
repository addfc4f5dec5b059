"""What SIGINT and SIGTERM do to a process that is still starting. Imports nothing heavy: it comes first."""

from __future__ import annotations

import os
import signal


def exit_on_signals(code: int) -> None:
    """End this process at once on SIGINT and SIGTERM, with this exit code.

    The kernel drops a signal that has no handler when the process is the first of its PID namespace, as in a
    container; and a KeyboardInterrupt in the middle of an import can get lost.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGTERM as on SIGINT, so that what was begun is cleaned up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
