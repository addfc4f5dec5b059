"""Maps that forget: beyond a number of entries, or after some time."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from peer.system.clock import Clock

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(UserDict[K, V]):
    """A dict of at most `limit` entries: beyond that, it forgets the one that was set longest ago."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        self.data.pop(key, None)
        self.data[key] = value
        while len(self.data) > self._limit:
            del self.data[next(iter(self.data))]


class ExpiringMap(MutableMapping[K, V]):
    """A dict whose entries end, each `seconds` after it was set.

    Args:
        clock: monotonic seconds.
        seconds: that an entry lives, where `put` says nothing else.
    """

    def __init__(self, clock: Clock, seconds: float = math.inf) -> None:
        self._clock, self._seconds = clock, seconds
        self._entries: dict[K, tuple[float, V]] = {}
        self._first_end = math.inf  # no entry ends before

    def put(self, key: K, value: V, seconds: float) -> None:
        """Set an entry that lives so long from now on, whatever was there before."""
        self._forget()
        until = self._clock() + seconds
        self._entries[key], self._first_end = (until, value), min(self._first_end, until)

    def left_s(self, key: K) -> float:
        """Seconds that an entry still has; 0 where there is none."""
        until, _ = self._entries.get(key, (-math.inf, None))
        return max(0.0, until - self._clock())

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value, self._seconds)

    def __getitem__(self, key: K) -> V:
        until, value = self._entries[key]
        if until <= self._clock():
            raise KeyError(key)
        return value

    def __delitem__(self, key: K) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[K]:
        self._forget()
        return iter(self._entries)

    def __len__(self) -> int:
        self._forget()
        return len(self._entries)

    def _forget(self) -> None:
        if (now := self._clock()) >= self._first_end:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0] > now}
            self._first_end = min((until for until, _ in self._entries.values()), default=math.inf)


class ExpiringSet(ExpiringMap[K, None]):
    """Keys that are held for some seconds."""

    def add(self, key: K, seconds: float | None = None) -> None:
        """Hold it for so long from now on."""
        self.put(key, None, self._seconds if seconds is None else seconds)
