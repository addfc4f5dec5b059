"""Keeps freed memory from staying with the process."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 3 << 19
KEPT_BYTES = 16 << 20
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def trim_malloc_arenas() -> None:
    """Let glibc keep one heap for all threads, and give every block of 1.5 MiB and more back to the system as soon as
    it is freed. To be called before there are threads.

    By default the limit grows to 32 MiB once such blocks are freed; then they come from the heaps of the threads
    that work on rounds, which keep them: up to 100 MB. Other C libraries have no such habit and no such switch.
    A slice as fp32 (2 MiB) between payloads would leave holes: after ten rounds of 10M parameters the heap was twice
    what was used of it. Such temporaries, and what lives longer, have memory of their own
    (`peer.outer.numerics.scratch`). Of smaller blocks the heap may keep 16 MiB, for several threads at once, or every
    tile would be mapped again: a third of an exchange's CPU time. Each thread with a heap of its own would keep
    half as much again, of what another one could use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_free_memory() -> None:
    """Let glibc return all free pages of its heaps; without this, what lies below the last used byte stays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
