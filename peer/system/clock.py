"""The two clocks for measuring time: they differ by the time that the machine was suspended."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
_BOOT: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS counts suspension in its POSIX clock


def boot_clock() -> float:
    """Seconds since some moment, with those in which the machine was suspended.

    The swarm's clock: other peers' deadlines do not wait for this machine's lid to open. Timers of asyncio do wait:
    they run on Linux's monotonic clock, and on Python's on macOS, which stand still meanwhile.
    """
    return time.clock_gettime(_BOOT)


def awake_clock() -> float:
    """Seconds since some moment, without those in which the machine was suspended.

    For what stands still with the machine: its training, and its share of the time that another peer has had.
    """
    return time.monotonic()
