"""Virtual time: what is to happen at which second, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """A queue of actions; `now` is the virtual second of the one that runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    @property
    def pending(self) -> bool:
        """Whether anything is still to happen."""
        return bool(self._queue)

    def at(self, time_s: float, action: Action) -> None:
        """Let it happen then; of several at one time, in the order in which they were asked for."""
        heapq.heappush(self._queue, (time_s, next(self._order), action))

    def advance(self) -> None:
        """To the next action, which runs."""
        self.now, _, action = heapq.heappop(self._queue)
        action()

    def wait(self, seconds: float) -> None:
        """Time goes by, and nothing happens in it."""
        self.now += seconds
