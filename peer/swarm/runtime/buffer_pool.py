"""Memory for what arrives in rounds: used again by the next one, given back when none follows soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from peer.outer.numerics.lending_pool import LendingPool
from peer.outer.numerics.scratch import pages_of

Lend = Callable[[int], memoryview]


def blank(length: int) -> memoryview:
    """Memory for so many bytes that arrive: not cleared, which would be a tenth of the work of receiving them."""
    return np.empty(length, np.uint8).data


class BufferPool:
    """Lends memory, and lends it again once no view of it is left.

    The system clears what it maps: a tenth of a round of 125M parameters in a virtual machine, and a quarter while
    others there want memory too.
    """

    def __init__(self) -> None:
        self._pool = LendingPool(pages_of, limit=0)
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Bytes that are kept, lent or not."""
        return self._pool.size

    def lend(self, length: int) -> memoryview:
        """Memory for so many bytes, with whatever was in it before.

        It is the borrower's for as long as a view of it, or of a part of it, exists.
        """
        return self._pool.lend(length).data

    def rest(self, kept_s: float) -> None:
        """A round is over: what it used is kept so long. A home machine has better use for it beyond that."""
        self._stay()
        self._forgetting = asyncio.get_running_loop().call_later(kept_s, self._pool.clear)

    def wake(self, limit: int) -> None:
        """A round begins; so many bytes, those of an update, may be kept for the next one."""
        self._pool.keep(limit)
        self._stay()

    def _stay(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
