"""A dense codec whose payloads are written in slices, so that a shard can be reduced while it still arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.outer.compress.base import Compressor, Payload, Read, StatelessCodec, check_length, check_range, receiver
from peer.outer.numerics.kernels import Coded
from peer.outer.numerics.tiles import tile_ranges

SLICE = 1 << 19  # elements; part of the protocol, since it decides where a payload's scales stand


@dataclass(frozen=True)
class Sliced(StatelessCodec):
    """The payloads of `base` for consecutive slices of `elements` values, one after the other.

    Vectors of at most one slice have the very payload of `base`.
    """

    base: Compressor
    elements: int = SLICE

    def __post_init__(self) -> None:
        assert self.elements % self.base.block == 0, f"slices of {self.elements} cut blocks of {self.base.block}"

    @property
    def name(self) -> str:
        """The name of `base`."""
        return self.base.name

    @property
    def block(self) -> int:
        return self.base.block

    def slices(self, start: int, stop: int) -> list[tuple[int, int]]:
        """[start, stop) cut into the slices that a shard of these elements is written in."""
        return list(tile_ranges(start, stop, self.base.block, self.elements))

    def wire_bytes(self, n: int) -> int:
        full, rest = divmod(n, self.elements)
        return full * self.base.wire_bytes(self.elements) + (self.base.wire_bytes(rest) if rest or not full else 0)

    def encode(self, x: Tensor) -> bytes:
        if x.numel() <= self.elements:
            return self.base.encode(x)
        return b"".join(self.base.encode(x[start:stop]) for start, stop in self.slices(0, x.numel()))

    def encode_ranges(self, n: int, read: Read) -> bytes:
        if n <= self.elements:
            return self.base.encode_ranges(n, read)

        def shifted(first: int) -> Read:
            return lambda start, stop: read(first + start, first + stop)

        slices = self.slices(0, n)
        return b"".join(self.base.encode_ranges(stop - start, shifted(start)) for start, stop in slices)

    def decode(self, payload: Payload, n: int) -> Tensor:
        return self.decode_range(payload, n, 0, n)

    def decode_range(
        self, payload: Payload, n: int, start: int, stop: int, out: Tensor | None = None, *, checked: bool = False
    ) -> Tensor:
        if n <= self.elements:
            return self.base.decode_range(payload, n, start, stop, out, checked=checked)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        check_range(self.block, n, start, stop)
        decoded = receiver(out, stop - start)
        for first, last, part in self._slices_in(view, n, start, stop):
            a, b = max(start, first), min(stop, last)
            own = decoded[a - start : b - start]
            self.base.decode_range(part, last - first, a - first, b - first, own, checked=checked)
        return decoded

    def coded(self, payload: Payload, n: int, start: int, stop: int) -> Sequence[Coded] | None:
        if n <= self.elements:
            return self.base.coded(payload, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        check_range(self.block, n, start, stop)
        coded: list[Coded] = []
        for first, last, part in self._slices_in(view, n, start, stop):
            own = self.base.coded(part, last - first, max(start, first) - first, min(stop, last) - first)
            if own is None:
                return None
            coded += own
        return coded

    def check(self, payload: Payload, n: int) -> None:
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        if n == 0:
            self.base.check(view, 0)
        for first, last, part in self._slices_in(view, n, 0, n):
            self.base.check(part, last - first)

    def _slices_in(self, view: memoryview, n: int, start: int, stop: int) -> Iterator[tuple[int, int, memoryview]]:
        """(first, last, payload) of every slice that [start, stop) meets."""
        size = self.base.wire_bytes(self.elements)
        for index in range(start // self.elements, -(-stop // self.elements)):
            first = index * self.elements
            last = min(first + self.elements, n)
            yield first, last, view[index * size : index * size + self.base.wire_bytes(last - first)]
