"""What rank 0 tells the other ranks of its peer, so that all do the same at the same moment.

An order is eight integers; some are followed by tensors. Rank 0 runs as a trainer with one device does, and whatever it
asks of its model, its optimizer or its recipe becomes an order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from peer.link.shared_vectors import SharedVectors, VectorPlace, VectorsOf
from peer.train.batch import Batch
from peer.train.moments import InnerMoments
from peer.train.optim import Optimizer, optimizer_tensors
from peer.train.rank_part import RankPart
from peer.train.ranks import Ranks, whole

NUMBERS = 8
PIECE = 2**22  # values that travel to another machine at a time: 16 MiB


class RankOrder(IntEnum):
    """The first number."""

    STOP, STEP, READ, WRITE, ROUND, RESET, LOAD, GATHER, FORWARD, BUILD, DONE = range(11)


class RankLeader:
    """Rank 0 of a peer with several.

    Args:
        vectors: of this process.
    """

    def __init__(self, ranks: Ranks, vectors: SharedVectors) -> None:
        self.ranks, self.vectors = ranks, vectors

    def order(self, kind: RankOrder, *numbers: int) -> None:
        """Tell all others."""
        header = torch.zeros(NUMBERS, dtype=torch.int64)
        self.ranks.arrive()
        header[: 1 + len(numbers)] = torch.tensor([int(kind), *numbers], dtype=torch.int64)
        dist.broadcast(header, 0, group=self.ranks.control)

    def deal(self, batch: Batch, rate: float) -> Batch:
        """All make a step; -> the part of rank 0."""
        parts = [batch.inputs_bt, batch.labels_bt, *([] if batch.positions_bt is None else [batch.positions_bt])]
        (bits,) = struct.unpack("<q", struct.pack("<d", rate))
        self.order(RankOrder.STEP, len(parts), *batch.inputs_bt.shape, bits)
        dist.broadcast(torch.stack(parts), 0, group=self.ranks.control)
        return self.ranks.part_of(batch)

    def on_vector(self, kind: RankOrder, vector: Tensor, *numbers: int) -> None:
        """An order that is about a vector in shared memory."""
        place = self.vectors.place_of(vector)
        assert place is not None, "not in shared memory"
        self.order(kind, *place, *numbers)
        if kind == RankOrder.ROUND:
            send_far(self.ranks, vector)


class RanksReplica:
    """The `LocalParameters` of all ranks: each copies its part straight between its device and shared memory.

    Args:
        number: of the model, where a recipe trains several.
    """

    def __init__(self, leader: RankLeader, part: RankPart | InnerMoments, number: int = 0) -> None:
        self._leader, self._part, self._number = leader, part, number

    def read(self, out: Tensor, start: int = 0) -> None:
        shared = self._shared(out)
        if self._leader.ranks.far is not None:
            shared.zero_()
        self._leader.on_vector(RankOrder.READ, shared, start, self._number)
        self._part.read(shared, start)
        self._leader.ranks.barrier()
        collect_far(self._leader.ranks, shared)
        if shared is not out:
            out.copy_(shared)

    def write(self, flat: Tensor, start: int = 0) -> None:
        shared = self._shared(flat)
        if shared is not flat:
            shared.copy_(flat)
        self._leader.on_vector(RankOrder.WRITE, shared, start, self._number)
        self._part.write(shared, start)
        for piece in torch.split(shared, PIECE):
            send_far(self._leader.ranks, piece)
        self._leader.ranks.barrier()

    def _shared(self, vector: Tensor) -> Tensor:
        if self._leader.vectors.place_of(vector) is not None:
            return vector
        return self._leader.vectors.stage(vector.numel())


class RankParts:
    """What a rank other than 0 holds of each model, and copies when `RanksReplica` orders it.

    Args:
        vectors: of rank 0.
    """

    def __init__(self, ranks: Ranks, vectors: VectorsOf, parts: Sequence[RankPart | InnerMoments]) -> None:
        self._ranks, self._vectors, self._parts = ranks, vectors, parts

    def move(self, kind: RankOrder, numbers: Sequence[int]) -> None:
        """READ or WRITE."""
        where, (start, model, *_) = place_in(numbers)
        part = self._parts[model]
        if not self._ranks.is_far:
            (part.read if kind == RankOrder.READ else part.write)(self._vectors.at(where), start)
        elif kind == RankOrder.WRITE:
            for begin in range(0, where.numel, PIECE):
                send_far(self._ranks, piece := torch.empty(min(PIECE, where.numel - begin)))
                part.write(piece, start + begin)
        self._ranks.barrier()
        if self._ranks.is_far and kind == RankOrder.READ and self._ranks.sharded:
            for begin in range(0, where.numel, PIECE):
                part.read(piece := torch.zeros(min(PIECE, where.numel - begin)), start + begin)
                collect_far(self._ranks, piece)


def send_far(ranks: Ranks, piece: Tensor) -> None:
    """From rank 0 to the ranks on other machines; fp32."""
    if ranks.far is not None:
        dist.broadcast(piece, 0, group=ranks.far)


def collect_far(ranks: Ranks, vector: Tensor) -> None:
    """Add what ranks on other machines hold of a vector, which is zero there at rank 0."""
    if ranks.far is not None and ranks.sharded:
        for piece in torch.split(vector, PIECE):
            dist.reduce(piece, 0, group=ranks.far)


def gathered(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The state of an optimizer, a whole tensor at a time on each rank; all ranks read it together."""
    for name, tensor in optimizer_tensors(optimizer).items():
        yield name, whole(tensor)


def next_order(ranks: Ranks) -> tuple[RankOrder, list[int]]:
    """Wait for one."""
    header = torch.zeros(NUMBERS, dtype=torch.int64)
    dist.broadcast(header, 0, group=ranks.control)
    ranks.arrive()
    kind, *numbers = header.tolist()
    return RankOrder(kind), numbers


def dealt(ranks: Ranks, numbers: Sequence[int]) -> tuple[Batch, float]:
    """The part of this rank in a step, and the learning rate."""
    count, rows, tokens, bits = numbers[:4]
    parts = torch.empty(count, rows, tokens, dtype=torch.int64)
    dist.broadcast(parts, 0, group=ranks.control)
    (rate,) = struct.unpack("<d", struct.pack("<q", bits))
    return ranks.part_of(Batch(*parts)), rate


def place_in(numbers: Sequence[int]) -> tuple[VectorPlace, list[int]]:
    """The vector that an order is about, and its other numbers."""
    return VectorPlace(*numbers[:3]), list(numbers[3:])


def send_document(ranks: Ranks, document: Mapping[str, Any]) -> None:
    """From rank 0 to the others; a JSON document."""
    text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor([text.numel()]), 0, group=ranks.control)
    dist.broadcast(text, 0, group=ranks.control)


def receive_document(ranks: Ranks) -> dict[str, Any]:
    """The other end of `send_document`."""
    dist.broadcast(size := torch.zeros(1, dtype=torch.int64), 0, group=ranks.control)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0, group=ranks.control)
    document: dict[str, Any] = json.loads(bytes(text.numpy()))
    return document


@torch.no_grad()
def share_tensors(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Give all ranks the values that rank 0 has; on the CPU, contiguous, of the same shapes and types everywhere."""
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0, group=ranks.control)


def send_tensors(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """From rank 0 to the others; fp32."""
    send_document(ranks, {name: list(tensor.shape) for name, tensor in tensors.items()})
    share_tensors(ranks, [tensor.to("cpu", torch.float32).contiguous() for tensor in tensors.values()])


def receive_tensors(ranks: Ranks) -> dict[str, Tensor]:
    """The other end of `send_tensors`, on the CPU."""
    tensors = {name: torch.empty(shape) for name, shape in receive_document(ranks).items()}
    share_tensors(ranks, list(tensors.values()))
    return tensors
