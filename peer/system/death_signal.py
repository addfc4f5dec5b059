"""No process outlives its owner: death signals for this process and for everything it forks (Linux).

Imported before hivemind, so that its children inherit the hook; uvloop runs the fork hooks also for subprocesses,
which is how the libp2p daemon gets the signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends; exit at once if it already has."""
    _arm()
    if os.getppid() != parent_pid:
        sys.exit(0)


def children_die_with_us() -> None:
    """Arm the same signal in whatever this process forks from now on, and put it in a process group of its own: a
    Ctrl-C on the terminal then reaches us alone, and we close our children in order."""

    def after_fork() -> None:
        _arm()
        os.setpgrp()

    os.register_at_fork(after_in_child=after_fork)


def _arm() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
