"""Seconds that count a suspended machine's as well: deadlines of others do not wait for its lid to open.

Linux's monotonic clock, and Python's on macOS, stand still meanwhile.
"""

from __future__ import annotations

import time

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS counts them in its POSIX clock


def boot_clock() -> float:
    """Seconds since some moment, never fewer than before."""
    return time.clock_gettime(_CLOCK)
