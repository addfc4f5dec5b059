"""The updates of rounds whose shards were reduced: what carries an outer state on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, MemberPayloadError, Payload, PayloadError
from peer.outer.numerics.kernels import Coded
from peer.outer.state.flat_layout import shards_of
from peer.protocol import hashing


class ConcatenatedPayloads:
    """Payloads of members, one after the other.

    Attributes:
        payloads: one for each member, in roster order.
    """

    payloads: tuple[Payload, ...]

    @property
    def payload(self) -> bytes:
        """All payloads, one after the other: what is stored, served and hashed."""
        return b"".join(self.payloads)

    def digest(self) -> str:
        """BLAKE3 of `payload` as 64 hex digits."""
        return hashing.digest(*self.payloads).hex()


@dataclass(frozen=True)
class Update(ConcatenatedPayloads):
    """The aggregated, compressed pseudo-gradient D of one round: one payload per shard.

    An instance is valid: every byte was checked when it was made, so that applying it cannot fail half-way.

    Attributes:
        payloads: one per shard, in order; as many as the round had reducers.
        numel: elements P in all.
        compressor: the codec that wrote every payload.

    Raises:
        PayloadError: at construction, for no payloads.
        MemberPayloadError: at construction, for a payload of the wrong length, or a malformed value.
    """

    payloads: tuple[Payload, ...]
    numel: int
    compressor: Compressor

    def __post_init__(self) -> None:
        if not self.payloads:
            raise PayloadError("an update of 0 shards; it must have at least 1")
        for place, (payload, (start, stop)) in enumerate(zip(self.payloads, self.bounds, strict=True)):
            try:
                self.compressor.check(payload, stop - start)
            except PayloadError as error:
                raise MemberPayloadError(place, error) from None

    @classmethod
    def split(cls, payload: Payload, numel: int, num_shards: int, compressor: Compressor) -> Update:
        """Cut a concatenated payload back into the payloads of its shards, which are views of it.

        Raises:
            PayloadError: not exactly the length that `num_shards` shards of `numel` elements have, or malformed.
        """
        if num_shards < 1:
            raise PayloadError(f"an update of {num_shards} shards; it must have at least 1")
        lengths = [compressor.wire_bytes(b - a) for a, b in shards_of(numel, num_shards, compressor.block)]
        if len(payload) != sum(lengths):
            raise PayloadError(f"update of {numel} values is {len(payload)} bytes; it must be {sum(lengths)}")
        view, ends = memoryview(payload), list(accumulate(lengths))
        payloads = (view[end - length : end] for length, end in zip(lengths, ends, strict=True))
        return cls(tuple(payloads), numel, compressor)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each shard, in elements."""
        return shards_of(self.numel, len(self.payloads), self.compressor.block)

    def decode_range(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Elements [start, stop) of D as fp32 [stop - start]; both multiples of the block, or stop == numel.

        Payloads were checked at construction, and are not again.

        Args:
            out: where to write them; a new vector by default.
        """
        decoded = torch.empty(stop - start) if out is None else out
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
        """(payload, its elements, start and stop within them) of every shard that [start, stop) meets."""
        for payload, (first, last) in zip(self.payloads, self.bounds, strict=True):
            a, b = max(start, first), min(stop, last)
            if a < b:
                yield payload, last - first, a - first, b - first
