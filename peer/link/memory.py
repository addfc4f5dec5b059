"""The outer state of a peer in anonymous shared memory (memfd), mapped by the trainer and its agent.

The trainer owns the descriptor, so the state outlives an agent that crashes: the next agent finds a head, checks the
state digest that it names, and resumes from it. Nothing is left behind in any file system.

layout, in bytes: head 4096 | anchor 4P | snapshot 4S, of the largest fragment | outer buffers 4P each
head: which of two slots counts, 0 for none (one byte, at 0) | at 8 and at 2048 a slot (length, CRC-32, JSON)

A head is written to the inactive slot, which then becomes active: a crash during the write leaves the previous head.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from peer.protocol.manifest import Digest, Spec

HEAD_BYTES = 4096
SLOTS = (8, 2048)  # where they begin
SLOT_BYTES = 2040
_HEADER = struct.Struct("<II")  # length of the head, its CRC-32
READS = 100  # of a head that changes meanwhile; two writes would have to fall into each


class Head(Spec):
    """Identifies the state that the anchor and the buffers hold. Absent while an update is being applied; without a
    digest until the state is hashed, while trainers continue.
    """

    round: int
    lineage_id: Digest
    state_digest: Digest | None = None
    contributed: int | None = None


class SharedState:
    """Tensors over one memfd.

    Args:
        descriptor: the memfd; stays owned by the caller.
        numel: parameters P.
        num_buffers: outer buffers of P elements each.
        sent: elements S of the largest fragment; None: P.

    Attributes:
        anchor: fp32 [P].
        snapshot: fp32 [S]; a smaller fragment lies at its start.
        buffers: list of fp32 [P].
        private: makes fp32 [n] beside it, which no agent sees.
    """

    def __init__(self, descriptor: int, numel: int, num_buffers: int, sent: int | None = None) -> None:
        lengths = [numel, numel if sent is None else sent, *[numel] * num_buffers]
        size = HEAD_BYTES + 4 * sum(lengths)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        vectors = [
            torch.frombuffer(self._map, dtype=torch.float32, count=length, offset=HEAD_BYTES + 4 * start)
            for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)
        ]
        self.anchor: Tensor = vectors[0]
        self.snapshot: Tensor = vectors[1]
        self.buffers: list[Tensor] = vectors[2:]
        self.private: Callable[[int], Tensor] = torch.empty

    @property
    def head(self) -> Head | None:
        """The head, or None when there is no complete state (new memory, or a crash while applying).

        The other process may write at this moment: what was read in the middle of that does not fit its checksum.
        """
        for _ in range(READS):
            counts = self._map[0]
            if not 1 <= counts <= len(SLOTS):
                return None
            place = SLOTS[counts - 1]
            length, checksum = _HEADER.unpack_from(self._map, place)
            text = self._map[place + _HEADER.size : place + _HEADER.size + min(length, SLOT_BYTES)]
            if zlib.crc32(text) == checksum and len(text) == length:
                return Head.model_validate_json(text)
        return None

    @head.setter
    def head(self, head: Head | None) -> None:
        if head is None:
            self._map[0] = 0
            return
        text = json.dumps(head.model_dump(mode="json")).encode()
        assert len(text) <= SLOT_BYTES - _HEADER.size
        free = 2 if self._map[0] == 1 else 1
        place = SLOTS[free - 1]
        _HEADER.pack_into(self._map, place, len(text), zlib.crc32(text))
        self._map[place + _HEADER.size : place + _HEADER.size + len(text)] = text
        self._map[0] = free
