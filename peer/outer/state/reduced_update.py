"""The updates of rounds whose shards were reduced: what carries an outer state on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

from torch import Tensor

from peer.outer.compress.base import (
    LARGEST_CONTRIBUTION,
    Compressor,
    MemberPayloadError,
    Payload,
    PayloadError,
    Read,
    check_length,
    check_values,
)
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.residual import DeferredResidual
from peer.outer.math.aggregation import Aggregation
from peer.outer.math.source import FeedbackEncoder, Source
from peer.outer.numerics.kernels import Coded
from peer.outer.numerics.scratch import scratch_vector
from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_ranges
from peer.outer.state.flat_layout import cell_of, shards_of
from peer.outer.state.wire_format import NOTHING, Sender, WireFormat
from peer.protocol import hashing

SLICE = 1 << 19  # elements; part of the protocol, since it decides where a payload's scales lie


class ConcatenatedPayloads:
    """Payloads of members, one after the other.

    Attributes:
        payloads: one for each member, in roster order.
        aggregation: what became of the contributions, where every member aggregates them by itself.
    """

    payloads: tuple[Payload, ...]
    aggregation: Aggregation | None = None

    @property
    def parts(self) -> tuple[Payload, ...]:
        """What `payload` consists of."""
        return self.payloads

    @property
    def payload(self) -> bytes:
        """All payloads, one after the other: what is stored, served and hashed."""
        return b"".join(self.parts)

    def digest(self) -> str:
        """BLAKE3 of `payload` as 64 hex digits."""
        return hashing.digest(*self.parts).hex()


@dataclass(frozen=True)
class Update(ConcatenatedPayloads):
    """The aggregated, compressed pseudo-gradient D of one round: one payload per shard.

    An instance is valid: every byte was checked when it was made, so that applying it cannot fail half-way.

    Attributes:
        payloads: one per shard, in order; as many as the round had reducers.
        numel: elements P in all.
        compressor: the codec that wrote every slice.
        elements: of a slice; a payload is those of its slices, one after the other.
        shares: cells of each shard, where they are not alike.

    Raises:
        PayloadError: at construction, for no payloads.
        MemberPayloadError: at construction, for a payload of the wrong length, or a malformed value.
    """

    payloads: tuple[Payload, ...]
    numel: int
    compressor: Compressor
    elements: int = SLICE
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.payloads:
            raise PayloadError("an update of 0 shards; it must have at least 1")
        for place, (payload, (start, stop)) in enumerate(zip(self.payloads, self.bounds, strict=True)):
            slices = list(tile_ranges(0, stop - start, 1, self.elements))
            try:
                expected = sum(self.compressor.wire_bytes(b - a) for a, b in slices)
                check_length(payload, expected, self.compressor.name, stop - start)
                for content, n, _, _ in self._overlaps(start, stop):
                    self.compressor.check(content, n)
            except PayloadError as error:
                raise MemberPayloadError(place, error) from None

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each shard, in elements."""
        return shards_of(self.numel, len(self.payloads), self.compressor.block, self.shares)

    def decode_range(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of D as fp32 [stop - start]; both multiples of the block, or stop == numel.

        Payloads were checked at construction, and are not again.
        """
        decoded = scratch_vector(stop - start)
        position = 0
        for payload, n, a, b in self._overlaps(start, stop):
            own = decoded[position : position + b - a]
            self.compressor.decode_range(payload, n, a, b, own, checked=True)
            position += b - a
        return decoded

    def coded(self, start: int, stop: int) -> Sequence[Coded] | None:
        """What a compiled loop reads in place of `decode_range`; None where no loop reads this codec."""
        coded: list[Coded] = []
        for payload, n, a, b in self._overlaps(start, stop):
            own = self.compressor.coded(payload, n, a, b)
            if own is None:
                return None
            coded += own
        return coded

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Payload, int, int, int]]:
        """(payload, its elements, start and stop within them) of every slice that [start, stop) meets."""
        size = self.compressor.wire_bytes(self.elements)
        for payload, (first, last) in zip(self.payloads, self.bounds, strict=True):
            low, high = max(start, first) - first, min(stop, last) - first
            for index in range(low // self.elements, -(-high // self.elements)) if low < high else ():
                begin = index * self.elements
                n = min(self.elements, last - first - begin)
                content = memoryview(payload)[index * size :][: self.compressor.wire_bytes(n)]
                yield content, n, max(low - begin, 0), min(high - begin, n)


class ShardSender(Sender):
    """The contributions of one peer, slice by slice; see `Sender`."""

    residual: DeferredResidual | None

    def __init__(self, codec: Compressor, numel: int, feedback: ErrorFeedback | None) -> None:
        self._codec = codec
        self.residual = None if feedback is None else DeferredResidual(feedback, numel)

    def encode(self, source: Source, start: int, stop: int, round: int, share: int = 0) -> Payload:  # noqa: ARG002
        return source.encode(self._codec, start, stop, self.residual)


class ReduceFormat(WireFormat):
    """Each member reduces one shard: it is sent the slices of that shard, and sends their aggregates; see `WireFormat`.

    Args:
        numel: elements of the vector.
        codec: of a slice.
        elements: of a slice.
        shares: cells that each member reduces; none: all alike.
    """

    codec: Compressor

    def __init__(
        self, numel: int, codec: Compressor, elements: int = SLICE, shares: tuple[int, ...] = ()
    ) -> None:
        assert TILE_ELEMENTS % codec.block == 0, f"tiles of {TILE_ELEMENTS} do not hold whole blocks of {codec.block}"
        assert elements % codec.block == 0, f"slices of {elements} cut blocks of {codec.block}"
        self.numel, self.codec, self.elements, self.cell = numel, codec, elements, cell_of(numel, codec.block)
        self.shares = shares

    def among(self, shares: Sequence[int]) -> ReduceFormat:
        cells = -(-self.numel // self.cell)
        if shares and sum(shares) != cells:
            raise PayloadError(f"shards of {sum(shares)} cells in all; the vector has {cells}")
        return ReduceFormat(self.numel, self.codec, self.elements, tuple(shares)) if shares else self

    def bounds(self, members: int) -> Sequence[tuple[int, int]]:
        return shards_of(self.numel, members, self.codec.block, self.shares)

    def slices(self, members: int, place: int) -> Sequence[tuple[int, int]]:
        return list(tile_ranges(*self.bounds(members)[place], 1, self.elements))

    def broadcast_bytes(self, members: int, place: int) -> list[int]:
        return self.contributed_bytes(members, place)

    def sender(self, feedback: ErrorFeedback | None) -> ShardSender:
        return ShardSender(self.codec, self.numel, feedback)

    def reduce(
        self, aggregation: Aggregation, payloads: Sequence[Payload], start: int, stop: int,
        feedback: FeedbackEncoder | None = None,
    ) -> bytes:  # fmt: skip
        """See `WireFormat.reduce`."""

        def write(n: int, read: Read) -> bytes:
            return feedback.encode(self.codec, start, stop, read) if feedback else self.codec.encode_ranges(n, read)

        def contribution(payload: Payload, first: int, last: int, room: Tensor | None) -> Tensor:
            place = payload, stop - start, first, last
            values = self.codec.decode_range(*place, room)
            check_values(values, LARGEST_CONTRIBUTION, self.codec.coded(*place))
            return values

        contributions = [partial(contribution, payload) for payload in payloads]
        return aggregation.reduce(contributions, stop - start, write)

    def mean(
        self, aggregation: Aggregation, payloads: Sequence[Payload], start: int, stop: int, round: int  # noqa: ARG002
    ) -> tuple[Tensor, Aggregation]:
        return self.codec.decode(self.reduce(aggregation, payloads, start, stop), stop - start), aggregation

    def update(
        self, payloads: Sequence[Payload], weights: Sequence[int], round: int,  # noqa: ARG002
        known: Mapping[int, Tensor] = NOTHING,  # noqa: ARG002
    ) -> Update:  # fmt: skip
        return Update(tuple(payloads), self.numel, self.codec, self.elements, self.shares)

    def split(self, payload: Payload, weights: Sequence[int], round: int) -> Update:
        members = len(weights)
        lengths = [sum(self.contributed_bytes(members, place)) for place in range(members)]
        if len(payload) != sum(lengths):
            raise PayloadError(f"update of {self.numel} values is {len(payload)} bytes; it must be {sum(lengths)}")
        view, ends = memoryview(payload), accumulate(lengths)
        payloads = [view[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        return self.update(payloads, weights, round)

    def update_bytes(self, members: int) -> int:
        return sum(sum(self.contributed_bytes(members, place)) for place in range(members))
