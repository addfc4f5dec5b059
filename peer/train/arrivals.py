"""How far each rank of a machine has come: what tells one that hangs from those that wait for it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

BYTES = 8


class Arrivals:
    """A count for each rank, of the moments at which all meet, in a file that all of them map.

    Args:
        path: of the file; made if absent.
        count: how many ranks there are.
    """

    def __init__(self, path: Path, count: int) -> None:
        with path.open("a+b") as file:
            os.truncate(file.fileno(), BYTES * count)
            self._counts = memoryview(mmap.mmap(file.fileno(), BYTES * count)).cast("q")

    def arrive(self, rank: int) -> None:
        """This rank has come to the next one."""
        self._counts[rank] += 1

    @property
    def counts(self) -> list[int]:
        """As they are now."""
        return self._counts.tolist()

    def last(self) -> int | None:
        """The rank that the others wait for; None where all are as far."""
        counts = self.counts
        return None if min(counts) == max(counts) else counts.index(min(counts))
