"""asyncio: ending tasks for certain, and the threads that blocking work runs in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

AGAIN_S = 0.05
MAX_THREADS = 6


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and return when all have ended; their outcomes are dropped.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes at the moment its inner call completes, so
    one `cancel()` is not enough.
    """
    tasks = list(tasks)
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it


def use_few_threads() -> None:
    """Let this loop's threads be about as many as can work at once: each keeps a heap and a stack of its own."""
    workers = min(MAX_THREADS, (os.cpu_count() or 1) + 2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(workers, thread_name_prefix="work"))
