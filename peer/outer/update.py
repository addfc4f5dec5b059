"""The updates of rounds whose parts were reduced: what carries an outer state on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, Payload, PayloadError
from peer.outer.fragments import parts_of
from peer.protocol import hashing


class InParts:
    """Payloads of members, one after the other.

    Attributes:
        parts: one for each member, in roster order.
    """

    parts: tuple[Payload, ...]

    @property
    def payload(self) -> bytes:
        """All parts, one after the other: what is stored, served and hashed."""
        return b"".join(self.parts)

    def digest(self) -> str:
        """BLAKE3 of `payload` as 64 hex digits."""
        return hashing.digest(*self.parts).hex()


@dataclass(frozen=True)
class Update(InParts):
    """The aggregated, compressed pseudo-gradient D of one round: one payload per part of `partition`.

    An instance is valid: every byte was checked when it was made, so that applying it cannot fail half-way.

    Attributes:
        parts: one payload per part, in order; as many as the round had reducers.
        numel: elements P in all.
        compressor: the codec that wrote every part.

    Raises:
        PayloadError: at construction, for no parts, a part of the wrong length, or a malformed value.
    """

    parts: tuple[Payload, ...]
    numel: int
    compressor: Compressor

    def __post_init__(self) -> None:
        if not self.parts:
            raise PayloadError("an update of 0 parts; it must have at least 1")
        for payload, (start, stop) in zip(self.parts, self.bounds, strict=True):
            self.compressor.check(payload, stop - start)

    @classmethod
    def split(cls, payload: Payload, numel: int, num_parts: int, compressor: Compressor) -> Update:
        """Cut a concatenated payload back into its parts.

        Raises:
            PayloadError: not exactly the length that `num_parts` parts of `numel` elements have, or malformed.
        """
        if num_parts < 1:
            raise PayloadError(f"an update of {num_parts} parts; it must have at least 1")
        lengths = [compressor.wire_bytes(b - a) for a, b in parts_of(numel, num_parts, compressor.block)]
        if len(payload) != sum(lengths):
            raise PayloadError(f"update of {numel} values is {len(payload)} bytes; it must be {sum(lengths)}")
        parts, position = [], 0
        for length in lengths:
            parts.append(payload[position : position + length])
            position += length
        return cls(tuple(parts), numel, compressor)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each part, in elements."""
        return parts_of(self.numel, len(self.parts), self.compressor.block)

    def decode_range(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Elements [start, stop) of D as fp32 [stop - start]; both multiples of the block, or stop == numel.

        Payloads were checked at construction, and are not again.

        Args:
            out: where to write them; a new vector by default.
        """
        return decode_parts(self.parts, self.bounds, self.compressor, start, stop, out)


def decode_parts(
    parts: Sequence[Payload], bounds: Sequence[tuple[int, int]], compressor: Compressor, start: int, stop: int,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Elements [start, stop) of the vector whose parts have these payloads and [start, stop); nothing is checked."""
    decoded = torch.empty(stop - start) if out is None else out
    for payload, (first, last) in zip(parts, bounds, strict=True):
        a, b = max(start, first), min(stop, last)
        if a < b:
            own = decoded[a - start : b - start]
            compressor.decode_range(payload, last - first, a - first, b - first, own, checked=True)
    return decoded
