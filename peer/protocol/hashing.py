"""BLAKE3 digests of large data: chunks of the outer state, and updates. Ids, links and rosters use SHA-256.

BLAKE3 has the same strength, and takes less than half of SHA-256's time even on processors with instructions for that.
"""

from __future__ import annotations

from blake3 import blake3

Bytes = bytes | bytearray | memoryview


class Hasher:
    """BLAKE3 over bytes of several buffers, in the calling thread alone: the other cores are the trainer's."""

    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, data: Bytes) -> None:
        """Take in more; any contiguous buffer."""
        self._hash.update(memoryview(data).cast("B"))

    def digest(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()


def digest(*buffers: Bytes) -> bytes:
    """BLAKE3 (32 bytes) of all buffers, one after the other."""
    hasher = Hasher()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.digest()
