"""fp32 vectors in anonymous shared memory, which all processes of one peer on this machine can map.

The process that makes a vector owns its descriptor; another one of the same user opens it as /proc/PID/fd/N. So there
is one copy, nothing is left behind in any file system, and no other user of the machine can open it.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

VALUE_BYTES = 4


class VectorPlace(NamedTuple):
    """Where a vector lies: the descriptor in the process that owns it, bytes from its beginning, values."""

    descriptor: int
    offset: int
    numel: int


class SharedVectors:
    """Those that this process owns, and where they are."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int, int]] = []  # first address, the one after the last, descriptor
        self._stage: Tensor | None = None

    def empty(self, numel: int) -> Tensor:
        """A new vector, fp32 [numel], which lives as long as this process."""
        descriptor = os.memfd_create("atoll-vector", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, VALUE_BYTES * numel))
        vector = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.float32, count=numel)
        self.know(descriptor, vector, 0)
        return vector

    def know(self, descriptor: int, vector: Tensor, offset: int) -> None:
        """This vector lies in a memfd of this process, so many bytes from its beginning; so does what surrounds it."""
        first = vector.data_ptr() - offset
        self._known.append((first, first + os.fstat(descriptor).st_size, descriptor))

    def place_of(self, vector: Tensor) -> VectorPlace | None:
        """Where a contiguous fp32 vector lies; None: not in shared memory."""
        begin, numel = vector.data_ptr(), vector.numel()
        for first, stop, descriptor in self._known:
            if first <= begin and begin + VALUE_BYTES * numel <= stop:
                return VectorPlace(descriptor, begin - first, numel)
        return None

    def stage(self, numel: int) -> Tensor:
        """A vector in shared memory for a moment, the same memory each time; fp32 [numel]."""
        if self._stage is None or self._stage.numel() < numel:
            self._stage = self.empty(numel)
        return self._stage[:numel]


class VectorsOf:
    """The vectors of another process of this peer.

    Args:
        pid: of that process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._maps: dict[int, mmap.mmap] = {}

    def at(self, place: VectorPlace) -> Tensor:
        """That vector itself: both processes see what either writes."""
        descriptor, offset, numel = place
        if descriptor not in self._maps:
            with open(f"/proc/{self._pid}/fd/{descriptor}", "r+b", buffering=0) as file:
                self._maps[descriptor] = mmap.mmap(file.fileno(), 0)
        return torch.frombuffer(self._maps[descriptor], dtype=torch.float32, count=numel, offset=offset)
