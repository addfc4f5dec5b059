"""How the payloads of a round are cut: into what each member sends to one other, and what it sends to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peer.outer.compress.sliced import Sliced
from peer.outer.state.flat_layout import cell_of, shards_of
from peer.outer.state.gathered_update import GatherFormat
from peer.outer.state.outer_state import OuterState

SLICE_BYTES = 1 << 19  # of a gathered payload; part of the protocol, since members sign a tree of slices
Ranges = Sequence[tuple[int, int]]


class Partition(Protocol):
    """For a member's place in a roster of so many."""

    def slices(self, members: int, place: int) -> Ranges:
        """[start, stop), in elements, of each slice of a contribution that is sent to that member alone."""

    def contributed_bytes(self, members: int, place: int) -> list[int]:
        """Bytes of each of them."""

    def broadcast_bytes(self, members: int, place: int) -> list[int]:
        """Bytes of each slice that the member sends to all others."""


@dataclass(frozen=True)
class ReducePartition:
    """Each member reduces one shard of the vector: it is sent the slices of that shard, and sends their aggregates."""

    numel: int
    codec: Sliced

    def bounds(self, members: int) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each member's shard."""
        return shards_of(self.numel, members, self.codec.block)

    @property
    def cell(self) -> int:
        """Elements of what shards are made of whatever the number of members, and what residuals are signed by."""
        return cell_of(self.numel, self.codec.block)

    def slices(self, members: int, place: int) -> Ranges:
        return self.codec.slices(*self.bounds(members)[place])

    def contributed_bytes(self, members: int, place: int) -> list[int]:
        return [self.codec.base.wire_bytes(stop - start) for start, stop in self.slices(members, place)]

    def broadcast_bytes(self, members: int, place: int) -> list[int]:
        return self.contributed_bytes(members, place)


@dataclass(frozen=True)
class GatherPartition:
    """No member reduces: each sends its whole payload to all others."""

    numel: int
    gathering: GatherFormat

    def slices(self, members: int, place: int) -> Ranges:  # noqa: ARG002
        """None."""
        return ()

    def contributed_bytes(self, members: int, place: int) -> list[int]:  # noqa: ARG002
        """None."""
        return []

    def broadcast_bytes(self, members: int, place: int) -> list[int]:  # noqa: ARG002
        full, rest = divmod(self.gathering.wire_bytes(self.numel), SLICE_BYTES)
        return [SLICE_BYTES] * full + ([rest] if rest else [])


def partition_of(state: OuterState) -> ReducePartition | GatherPartition:
    """How the rounds of this state are cut."""
    if isinstance(state.compressor, GatherFormat):
        return GatherPartition(state.numel, state.compressor)
    codec = state.compressor
    assert isinstance(codec, Sliced), f"{codec.name}: updates must be written as they are exchanged, in slices"
    return ReducePartition(state.numel, codec)
