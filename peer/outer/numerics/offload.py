"""Runs arithmetic in a worker thread, so that the event loop continues; small operations run inline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

SMALL = 1 << 21  # elements: an outer step takes 2 ms, and where others work the way to a thread and back takes as long
T = TypeVar("T")


def is_small(elements: int) -> bool:
    """Whether what there is to do with so many elements is less work than to have it done elsewhere."""
    return elements <= SMALL


async def run_offloaded(elements: int, work: Callable[..., T], *arguments: Any) -> T:
    """What `work` returns, which has to do with so many elements."""
    return work(*arguments) if is_small(elements) else await asyncio.to_thread(work, *arguments)
