"""asyncio: futures that hold what is to arrive, or why it never does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from peer.system.clock import Clock

T = TypeVar("T")


def deliver(future: asyncio.Future[T], value: T) -> None:
    """Set the result, unless the future is done already: its round ended meanwhile."""
    if not future.done():
        future.set_result(value)


def fail(error: Exception, *futures: asyncio.Future[Any]) -> None:
    """Set the error of all that are not done; it is no bug if no task awaits them any more."""
    error.__traceback__ = None  # its frames know the round, which knows it: only the collector would free them
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()  # retrieved, or asyncio would log it


def settled(value: T) -> asyncio.Future[T]:
    """A future that has this result."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def has_come(future: asyncio.Future[Any]) -> bool:
    """Whether what was awaited is there."""
    return future.done() and not future.cancelled() and future.exception() is None


def done_at(futures: Mapping[str, asyncio.Future[Any]], clock: Clock) -> dict[str, float]:
    """When each future is done, once it is."""
    times: dict[str, float] = {}

    def note(name: str, _: asyncio.Future[Any]) -> None:
        times[name] = clock()

    for name, future in futures.items():
        future.add_done_callback(partial(note, name))
    return times
