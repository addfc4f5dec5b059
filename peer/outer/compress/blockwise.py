"""Dense codecs: every value of the vector, in blocks with scales of their own.

Payload: the scales of all blocks, then the codes of all blocks; the last block may be shorter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.outer.compress.base import (
    Payload,
    Read,
    StatelessCodec,
    check_length,
    check_range,
    check_vector,
    empty_payload,
    look_at,
    receiver,
)
from peer.outer.compress.bits import packed_bytes
from peer.outer.compress.coarse import INT2_SCALES
from peer.outer.compress.levels import INT4_SCALES
from peer.outer.compress.values import Values
from peer.outer.numerics.kernels import LONGEST_ROW, Coded
from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_elements, tile_ranges

_LOOPS = {"int4": (4, INT4_SCALES), "int2": (2, INT2_SCALES)}  # bits and scales of what compiled loops read


class InBlocks(StatelessCodec):
    """The part of `Compressor` that is the same for all codecs of blocks: the payload is written and read by groups.

    Attributes:
        block: elements with a scale of their own.
    """

    block: int

    def encode(self, x: Tensor) -> bytes:
        check_vector(x)
        return self._encode(x.numel(), lambda start, stop: x[start:stop], tile_elements(x.device))

    def encode_ranges(self, n: int, read: Read) -> bytes:
        return self._encode(n, read, TILE_ELEMENTS)

    def _encode(self, n: int, read: Read, elements: int) -> bytes:
        payload = empty_payload(self.wire_bytes(n))
        for start, stop in tile_ranges(0, n, self.block, elements):
            x = read(start, stop)
            check_vector(x)
            full = x.numel() // self.block * self.block
            if full:
                self._write(payload, n, start, x[:full].view(-1, self.block))
            if full < x.numel():
                self._write(payload, n, start + full, x[full:].view(1, -1))
        return payload.numpy().tobytes()

    def decode(self, payload: Payload, n: int) -> Tensor:
        return self.decode_range(payload, n, 0, n)

    def decode_range(
        self, payload: Payload, n: int, start: int, stop: int, out: Tensor | None = None, *, checked: bool = False
    ) -> Tensor:
        check_range(self.block, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        decoded = receiver(out, stop - start)
        for first, rows, width in self._groups(start, stop):
            if not checked:
                self._check(view, n, first, rows, width)
            at = first - start
            self._read(view, n, first, decoded[at : at + rows * width].view(rows, width))
        return decoded

    def coded(self, payload: Payload, n: int, start: int, stop: int) -> Sequence[Coded] | None:
        if self.block > LONGEST_ROW:
            return None
        check_range(self.block, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        found = [self._coded(view, n, *group) for group in self._groups(start, stop)]
        coded = [one for one in found if one is not None]
        return coded if len(coded) == len(found) else None

    def check(self, payload: Payload, n: int) -> None:
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        for first, rows, width in self._groups(0, n):
            self._check(view, n, first, rows, width)

    def _groups(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first element, blocks, elements in each) of the groups that make up [start, stop)."""
        full_stop = stop - stop % self.block
        for first, last in tile_ranges(start, full_stop, self.block, TILE_ELEMENTS):
            yield first, (last - first) // self.block, self.block
        if start < stop and full_stop < stop:
            yield full_stop, 1, stop - full_stop

    @property
    @abstractmethod
    def name(self) -> str:
        """As in the expressions of the registry."""

    @abstractmethod
    def wire_bytes(self, n: int) -> int:
        """See `Codec.wire_bytes`."""

    @abstractmethod
    def _write(self, payload: Tensor, n: int, start: int, rows: Tensor) -> None:
        """Blocks, fp32 [r, w], whose first is the element `start` of n, into `payload`, uint8 [wire_bytes(n)]."""

    @abstractmethod
    def _check(self, view: memoryview, n: int, start: int, rows: int, width: int) -> None:
        """Look at `rows` blocks of `width` elements, of which the element `start` of n is the first.

        Raises:
            PayloadError: a scale or a code that `_write` never writes.
        """

    @abstractmethod
    def _read(self, view: memoryview, n: int, start: int, out: Tensor) -> None:
        """The inverse of `_write`, of what `_check` let pass, into `out`: fp32 [r, w]."""

    def _coded(self, view: memoryview, n: int, start: int, rows: int, width: int) -> Coded | None:  # noqa: ARG002
        """Where `_read` finds what it reads, if a compiled loop reads it as well."""
        return None


@dataclass(frozen=True)
class Blockwise(InBlocks):
    """`values` for each block of `block` elements; the error is that of `values` with the block as its row."""

    values: Values
    block: int

    def __post_init__(self) -> None:
        assert self.block % 8 == 0, f"block={self.block}: must be a multiple of 8"  # so that blocks end at bytes

    @property
    def name(self) -> str:
        """That of the values."""
        return self.values.name

    def wire_bytes(self, n: int) -> int:
        """scale_bytes ceil(n / block) + ceil(n bits / 8)."""
        return self.values.scale_bytes * -(-n // self.block) + packed_bytes(n, self.values.bits)

    def _write(self, payload: Tensor, n: int, start: int, rows: Tensor) -> None:
        scales, codes = self.values.quantize(rows)
        for offset, field in ((self._scale_offset(start), scales), (self._code_offset(n, start), codes)):
            payload[offset : offset + field.numel()] = field.flatten()

    def _check(self, view: memoryview, n: int, start: int, rows: int, width: int) -> None:
        scales, codes = self.values.scale_bytes, packed_bytes(width, self.values.bits)
        self.values.check(
            look_at(view, self._scale_offset(start), rows, scales),
            look_at(view, self._code_offset(n, start), rows, codes),
            width,
        )

    def _read(self, view: memoryview, n: int, start: int, out: Tensor) -> None:
        rows, width = out.shape
        scales = look_at(view, self._scale_offset(start), rows, self.values.scale_bytes)
        codes = look_at(view, self._code_offset(n, start), rows, packed_bytes(width, self.values.bits))
        self.values.dequantize(scales, codes, out)

    def _coded(self, view: memoryview, n: int, start: int, rows: int, width: int) -> Coded | None:
        if self.name not in _LOOPS:
            return None
        bits, limits = _LOOPS[self.name]
        scales, codes = self._scale_offset(start), self._code_offset(n, start)
        return Coded(
            bits, view[scales : scales + rows * self.values.scale_bytes],
            view[codes : codes + rows * packed_bytes(width, bits)], rows, width, limits,
        )  # fmt: skip

    def _scale_offset(self, start: int) -> int:
        return start // self.block * self.values.scale_bytes

    def _code_offset(self, n: int, start: int) -> int:
        return self.values.scale_bytes * -(-n // self.block) + start // 8 * self.values.bits
