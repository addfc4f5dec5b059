"""Rounds have priority over serving state: a donor's work for joiners waits while its own round is exchanged."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple

from peer.swarm.runtime.timing import STANDARD, Timing
from peer.system.clock import Clock, boot_clock

SHARE = 0.01  # of a longer one is for joiners, all together; a round waits for each of its members, so it adds up
Aside = Callable[[], None]


def go_on() -> None:
    """No-op yield point."""


async def _go_on() -> None:
    """The same in the loop."""


class IoSlot(NamedTuple):
    """The time for one chunk. If a round begins meanwhile, it has priority, as before the slot.

    Attributes:
        aside: yield point for work in a thread, called between tiles; never while holding what a round needs.
        wait: yield point for work in the event loop.
    """

    aside: Aside = go_on
    wait: Callable[[], Awaitable[None]] = _go_on


class RoundPriority:
    """Schedules the serving of history, one `turn` per chunk, around rounds, which report their begin and end.

    Work that remains for a round when it is over belongs to it: the next one would have to wait for that.

    Args:
        timing: a round that is shorter than `round_untouched_s` is left alone; a chunk waits for `io_turn_s`.
    """

    def __init__(self, timing: Timing = STANDARD, clock: Clock = boot_clock) -> None:
        self._timing, self._clock = timing, clock
        self._quiet = asyncio.Event()
        self._calm = threading.Event()  # the same for threads
        self._let_in()
        self._rounds = 0
        self._next = 0.0  # when the next turn may begin in the round that is exchanged

    def round_begins(self) -> None:
        self._rounds += 1
        self._next = self._clock() + self._timing.round_untouched_s
        self._quiet.clear()
        self._calm.clear()

    def round_ends(self, rest: asyncio.Future[None] | None = None) -> None:
        """The round is over; `rest` is the work that remains for it."""
        over = self._rounds
        if rest is None or rest.done():
            self._let_in()
        else:
            rest.add_done_callback(lambda _: self._let_in() if self._rounds == over else None)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[IoSlot]:
        """The time for one chunk: at once where no round is exchanged, or after `io_turn_s`. Before that, in a round
        that lasts, one after another, with so much time between them that the round has nearly all of it.
        """
        latest = self._clock() + self._timing.io_turn_s
        await self._wait(latest)
        if self._quiet.is_set():
            yield IoSlot(partial(self._stand_aside, latest), partial(self._wait, latest))
            return
        began = self._clock()
        self._next = began + self._timing.io_turn_s  # no other turn, until the duration of this one is known
        try:
            yield IoSlot()
        finally:
            now = self._clock()
            self._next = now + min((now - began) * (1 / SHARE - 1), self._timing.io_turn_s)

    async def _wait(self, latest: float) -> None:
        while (left := self._left(latest)) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), left)

    def _stand_aside(self, latest: float) -> None:
        while (left := self._left(latest)) > 0:
            self._calm.wait(left)

    def _left(self, latest: float) -> float:
        """Seconds for which the current round still has full priority; 0 if there is none."""
        return 0.0 if self._calm.is_set() else min(self._next, latest) - self._clock()

    def _let_in(self) -> None:
        self._quiet.set()
        self._calm.set()
