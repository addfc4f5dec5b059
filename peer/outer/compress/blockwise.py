"""Dense codecs: every value of the vector, in blocks with scales of their own.

Payload: the scales of all blocks, then the codes of all blocks; the last block may be shorter.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from peer.outer.compress.base import (
    GROUP_ELEMENTS,
    READ_ELEMENTS,
    Payload,
    Plain,
    Read,
    check_by_decoding,
    check_length,
    check_range,
    check_vector,
    empty_payload,
    group_elements,
    groups,
    read_bytes,
    receiver,
)
from peer.outer.compress.bits import packed_bytes
from peer.outer.compress.values import Values


class InBlocks(Plain):
    """The part of `Compressor` that is the same for all codecs of blocks: the payload is written and read by groups.

    Attributes:
        block: elements with a scale of their own.
    """

    block: int

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`."""
        check_vector(x)
        return self._encode(x.numel(), lambda start, stop: x[start:stop], group_elements(x.device))

    def encode_ranges(self, n: int, read: Read) -> bytes:
        """See `Compressor.encode_ranges`."""
        return self._encode(n, read, READ_ELEMENTS)

    def _encode(self, n: int, read: Read, elements: int) -> bytes:
        payload = empty_payload(self.wire_bytes(n))
        for start, stop in groups(0, n, self.block, elements):
            x = read(start, stop)
            check_vector(x)
            full = x.numel() // self.block * self.block
            if full:
                self._write(payload, n, start, x[:full].view(-1, self.block))
            if full < x.numel():
                self._write(payload, n, start + full, x[full:].view(1, -1))
        return payload.numpy().tobytes()

    def decode(self, payload: Payload, n: int) -> Tensor:
        """See `Codec.decode`."""
        return self.decode_range(payload, n, 0, n)

    def decode_range(self, payload: Payload, n: int, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """See `Compressor.decode_range`."""
        check_range(self.block, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        decoded = receiver(out, stop - start)
        full_stop = stop - stop % self.block
        for first, last in groups(start, full_stop, self.block, GROUP_ELEMENTS):
            self._read(view, n, first, decoded[first - start : last - start].view(-1, self.block))
        if start < stop and full_stop < stop:
            self._read(view, n, full_stop, decoded[full_stop - start :].view(1, -1))
        return decoded

    def check(self, payload: Payload, n: int) -> None:
        """See `Compressor.check`."""
        check_by_decoding(self, payload, n)

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
    def _read(self, view: memoryview, n: int, start: int, out: Tensor) -> None:
        """The inverse, into `out`: fp32 [r, w].

        Raises:
            PayloadError: a scale or a code that `_write` never writes.
        """


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
        for offset, piece in ((self._scale_offset(start), scales), (self._code_offset(n, start), codes)):
            payload[offset : offset + piece.numel()] = piece.flatten()

    def _read(self, view: memoryview, n: int, start: int, out: Tensor) -> None:
        rows, width = out.shape
        scales = read_bytes(view, self._scale_offset(start), rows, self.values.scale_bytes)
        codes = read_bytes(view, self._code_offset(n, start), rows, packed_bytes(width, self.values.bits))
        self.values.dequantize(scales, codes, out)

    def _scale_offset(self, start: int) -> int:
        return start // self.block * self.values.scale_bytes

    def _code_offset(self, n: int, start: int) -> int:
        return self.values.scale_bytes * -(-n // self.block) + start // 8 * self.values.bits
