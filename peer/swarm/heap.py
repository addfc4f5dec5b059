"""Keeps freed memory from staying with the process."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 4 << 20
KEPT_BYTES = 8 << 20
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Let glibc give every block of 4 MiB and more back to the system as soon as it is freed.

    By default the limit grows to 32 MiB once such blocks are freed; then they come from the heaps of the threads
    that work on rounds, which keep them: up to 100 MB. Other C libraries have no such habit and no such switch.
    Smaller blocks, a slice as fp32 (2 MiB) among them, are temporaries of the arithmetic; each thread's heap may keep
    8 MiB of them, or every piece would be mapped anew: a third of an exchange's processor time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
