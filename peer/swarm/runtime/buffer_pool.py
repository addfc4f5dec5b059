"""Memory for what arrives in rounds: used again by the next one, given back when none follows soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from peer.outer.numerics.scratch import pages_of

KEPT_S = 30.0  # beyond that, memory for an update is worth more to a home machine than the time to map it anew

Bytes = NDArray[np.uint8]
Lend = Callable[[int], memoryview]


def blank(length: int) -> memoryview:
    """Memory for so many bytes that arrive: not cleared, which would be a tenth of the work of receiving them."""
    return np.empty(length, np.uint8).data


@dataclass(eq=False)
class _Kept:
    memory: Bytes
    lent: Callable[[], Bytes | None] = lambda: None


class BufferPool:
    """Lends memory, and lends it again once nobody holds a view of it any more.

    The system clears what it maps: a tenth of a round of 125M parameters in a virtual machine, and a quarter while
    others there want memory too.
    """

    def __init__(self) -> None:
        self._limit = 0
        self._kept: list[_Kept] = []
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Bytes that are kept, lent or not."""
        return sum(len(kept.memory) for kept in self._kept)

    def lend(self, length: int) -> memoryview:
        """Memory for so many bytes, with whatever was in it before.

        It is the borrower's for as long as a view of it, or of a part of it, exists.
        """
        fitting = [kept for kept in self._kept if kept.lent() is None and len(kept.memory) >= length]
        if fitting:
            kept = min(fitting, key=lambda kept: len(kept.memory))
        else:
            self._make_room(self._limit - length)
            kept = _Kept(pages_of(length))
            if self.size + length <= self._limit:
                self._kept.append(kept)
        lent = kept.memory[:length]  # an object of its own, which ends with the last view
        kept.lent = ref(lent)
        return lent.data

    def rest(self) -> None:
        """A round is over: what it used is kept for a while."""
        self._stay()
        self._forgetting = asyncio.get_running_loop().call_later(KEPT_S, self._kept.clear)

    def wake(self, limit: int) -> None:
        """A round begins; so many bytes, those of an update, may be kept for the next one."""
        self._limit = limit
        self._make_room(limit)
        self._stay()

    def _stay(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()

    def _make_room(self, left: int) -> None:
        """Give back what is free, the oldest first, until no more than `left` bytes are kept, if that can be."""
        for kept in [kept for kept in self._kept if kept.lent() is None]:
            if self.size <= left:
                return
            self._kept.remove(kept)
