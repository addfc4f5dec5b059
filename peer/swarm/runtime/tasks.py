"""asyncio: logging what a task failed with, ending tasks for certain, staggered calls, threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from peer.system.exit_signals import ending_signals
from peer.system.resources import usable_cores

T = TypeVar("T")
log = logging.getLogger(__name__)
AGAIN_S = 0.05  # no duration of the protocol: see `cancel_and_wait`
MAX_THREADS = 6


def log_failure(task: asyncio.Future[Any]) -> BaseException | None:
    """What a task that has ended failed with, which is logged with its traceback; None where it did not fail."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        name = getattr(task.get_coro(), "__qualname__", "") if isinstance(task, asyncio.Task) else ""
        log.error("the background task %s failed", name, exc_info=error)
    return error


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


async def staggered(
    names: Callable[[], Iterable[str]], call: Callable[[str], Coroutine[Any, Any, T]], delay_s: float,
    recheck_s: float,
) -> AsyncGenerator[tuple[str, asyncio.Future[T]], None]:
    """Call for the first name, and for each next one once none has ended for `delay_s` or another outcome is wanted.

    Yields name and outcome as the calls end; what still runs when the caller has enough (`aclosing`) is cancelled.

    Args:
        names: -> the names to call, the best first; evaluated before each call, for those that have appeared meanwhile.
        recheck_s: how often, when no name is left to call.
    """
    called, running = set[str](), dict[asyncio.Future[T], str]()
    try:
        while True:
            left = [name for name in names() if name not in called]
            if left:
                called.add(left[0])
                running[asyncio.ensure_future(call(left[0]))] = left[0]
            if not running:
                return
            pause_s = delay_s if len(left) > 1 else max(delay_s, recheck_s)
            done, _ = await asyncio.wait(running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future
    finally:
        await cancel_and_wait(running)


async def unless(interruption: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the interruption returns first. Whichever has not is cancelled."""
    interrupting, working = asyncio.ensure_future(interruption), asyncio.ensure_future(work)
    try:
        await asyncio.wait({interrupting, working}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_and_wait([interrupting, working])


def use_few_threads() -> None:
    """Let this loop's threads be about as many as can work at once: each keeps a heap and a stack of its own."""
    workers = min(MAX_THREADS, usable_cores() + 2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(workers, thread_name_prefix="work"))


def hush_foreign_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's handler of unhandled exceptions, except for two that are no errors.

    A search in hivemind's DHT that is cancelled, as one that takes too long is, leaves tasks behind that wait for its
    own events. And a TLS connection that is cancelled at the moment the other end answers is closed by uvloop before it
    sends the rest of the handshake; the canceller knows.
    """
    task, trouble = context.get("task"), context.get("exception")
    waits = isinstance(task, asyncio.Task) and getattr(task.get_coro(), "__qualname__", "") == "Event.wait"
    message = context.get("message", "")
    left = waits and "was destroyed" in message
    given_up = "on SSL protocol" in message and isinstance(trouble, RuntimeError) and "is closed" in str(trouble)
    if not (left or given_up):
        loop.default_exception_handler(context)


def end_on_signals() -> None:
    """Let the signals that end a process cancel the current task, so that what it has opened is closed in order."""
    task = asyncio.current_task()
    assert task is not None
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
