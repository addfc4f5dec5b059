"""Memory that is lent, and lent again once no view of it remains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np
from numpy.typing import NDArray

Values = TypeVar("Values", bound=np.generic)


@dataclass(eq=False)
class _Block(Generic[Values]):
    memory: NDArray[Values]
    borrower: Callable[[], Any] = lambda: None

    def lend(self, n: int) -> NDArray[Values]:
        lent = self.memory[:n]  # an object of its own, which ends with the last view
        self.borrower = ref(lent)
        return lent


class LendingPool(Generic[Values]):
    """Lends uninitialised arrays, and keeps the memory of some for the next borrower. For many threads.

    Args:
        make: memory for so many elements.
        limit: elements that are kept, lent or not.
        least: elements of a block that is kept, where the borrower asks for fewer.
    """

    def __init__(self, make: Callable[[int], NDArray[Values]], limit: int, least: int = 0) -> None:
        self._make, self._limit, self._least = make, limit, least
        self._blocks: list[_Block[Values]] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Elements that are kept, lent or not."""
        return sum(len(block.memory) for block in self._blocks)

    def lend(self, n: int) -> NDArray[Values]:
        """An array of n elements, with whatever was in it before: the borrower's for as long as it, or a view of it,
        exists. The smallest free block that fits is taken; if none does, the free ones make room for another.
        """
        with self._lock:
            fitting = [block for block in self._blocks if block.borrower() is None and len(block.memory) >= n]
            if fitting:
                return min(fitting, key=lambda block: len(block.memory)).lend(n)
            room = max(n, self._least)
            self._shrink(self._limit - room)
            if self.size + room > self._limit:
                return self._make(n)
            self._blocks.append(_Block(self._make(room)))
            return self._blocks[-1].lend(n)

    def keep(self, limit: int) -> None:
        """From now on, so many elements may be kept; free memory beyond that is given back."""
        with self._lock:
            self._limit = limit
            self._shrink(limit)

    def clear(self) -> None:
        """Keep nothing; what is lent stays with its borrowers."""
        with self._lock:
            self._blocks.clear()

    def _shrink(self, limit: int) -> None:
        """Give back free blocks, the oldest first, until no more is kept, if that can be."""
        for block in [block for block in self._blocks if block.borrower() is None]:
            if self.size <= limit:
                return
            self._blocks.remove(block)
