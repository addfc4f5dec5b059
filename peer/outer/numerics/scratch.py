"""Memory for the temporaries of one tile, reused once no view of it remains."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.numerics.lending_pool import LendingPool
from peer.outer.numerics.tiles import TILE_ELEMENTS

FEWEST: Final = TILE_ELEMENTS // 4  # fewer elements are the heap's to look after
MOST_KEPT: Final = 8  # 16 MiB: what the threads of an agent work with at the same time
MAPPED_BYTES: Final = range(64 * 1024, 4 << 20)  # below, much of a page would be lost; above, numpy asks for large ones


def pages_of(length: int) -> NDArray[np.uint8]:
    """So many bytes, for what outlives temporaries: they go back to the system when they are freed, and leave no hole
    in the heap.
    """
    return np.frombuffer(mmap.mmap(-1, length), np.uint8) if length in MAPPED_BYTES else np.empty(length, np.uint8)


def copy_of(x: Tensor) -> Tensor:
    """A copy of fp32 [n] in `pages_of` its own."""
    return torch.from_numpy(pages_of(x.nbytes).view(np.float32)).copy_(x)


class Scratch:
    """Vectors of up to `numel` elements, `most` of which keep their memory for the next borrower. For many threads.

    From the system, each would be cleared page by page: half as much time again for a round with error feedback. From
    the heap, they would leave holes between what lives longer, and a group of eight would keep twice the memory.
    """

    def __init__(self, numel: int, most: int) -> None:
        self._numel = numel
        self._pool = LendingPool(lambda n: np.empty(n, np.float32), limit=most * numel, least=numel)

    def vector(self, n: int) -> Tensor:
        """Uninitialised fp32 [n] on the CPU: the borrower's for as long as it, or a view of it, exists."""
        return torch.from_numpy(self._pool.lend(n)) if FEWEST <= n <= self._numel else torch.empty(n)


_SCRATCH: Final = Scratch(TILE_ELEMENTS, MOST_KEPT)


def scratch_vector(n: int) -> Tensor:
    """`Scratch.vector`, of this process."""
    return _SCRATCH.vector(n)
