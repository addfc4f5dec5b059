"""What SIGINT, SIGTERM and SIGHUP do to a process that is starting. Imports nothing heavy: it comes first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end: Ctrl-C, a service manager, a terminal that closes unless `nohup` is used."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if nohup else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_signals(code: int) -> None:
    """End this process at once on such a signal, with this exit code.

    The kernel drops a signal that has no handler when the process is the first of its PID namespace, as in a
    container; and a KeyboardInterrupt in the middle of an import can get lost.
    """
    for number in ending_signals():
        signal.signal(number, lambda *_: os._exit(code))


@contextmanager
def exiting_on_signals(code: int) -> Iterator[None]:
    """The same for as long as a command imports what it needs; afterwards each signal does what it did before."""
    before = {number: signal.getsignal(number) for number in ending_signals()}
    exit_on_signals(code)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on each of them, as on SIGINT, so that what was begun is cleaned up."""
    for number in ending_signals():
        signal.signal(number, signal.default_int_handler)
