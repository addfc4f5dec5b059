"""Block-wise 8-bit integers: one fp32 scale per block of values.

Payload: fp32 little-endian scales [ceil(n / block)], then int8 values [n]; value i decodes to scale * int8, one
IEEE multiplication. Scales are 0 or at least 2^-126: a machine that flushes subnormal numbers to zero decodes the
same bits as one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.compress.base import (
    GROUP_ELEMENTS,
    READ_ELEMENTS,
    Payload,
    PayloadError,
    Plain,
    Read,
    check_finite,
    check_length,
    check_range,
    check_vector,
    empty_payload,
    empty_vector,
    group_elements,
    groups,
)
from peer.outer.compress.values import largest_magnitudes

LEVELS = 127
_MIN_SCALE_BITS = 0x00800000  # 2^-126, the smallest normal fp32
_MAX_SCALE_BITS = 0x7C010203  # the largest fp32 that stays finite when multiplied by 127


@dataclass(frozen=True)
class BlockInt8(Plain):
    """Symmetric int8 with scale = max |x| / 127 of each block.

    With m = max |x| of the block, the error of each value is at most max(m / 254, 2^-127) + 2^-22 m, where the last
    term is fp32 rounding. An all-zero block has scale 0 and decodes to zeros.
    """

    block: int = 256

    @property
    def name(self) -> str:
        """`int8`."""
        return "int8"

    def encode(self, x: Tensor) -> bytes:
        """See `Compressor.encode`."""
        check_vector(x)
        return self._encode(x.numel(), lambda start, stop: x[start:stop], group_elements(x.device))

    def encode_ranges(self, n: int, read: Read) -> bytes:
        """See `Compressor.encode_ranges`."""
        return self._encode(n, read, READ_ELEMENTS)

    def _encode(self, n: int, read: Read, elements: int) -> bytes:
        scales = torch.empty(self._num_blocks(n))
        payload = empty_payload(self.wire_bytes(n))
        values = payload[4 * scales.numel() :].view(torch.int8)
        for start, stop in groups(0, n, self.block, elements):
            x = read(start, stop)
            check_vector(x)
            full = (stop - start) // self.block * self.block
            cut = start // self.block + full // self.block
            rows, tail = slice(start, start + full), slice(start + full, stop)
            if full:
                _quantize(
                    x[:full].view(-1, self.block), scales[start // self.block : cut], values[rows].view(-1, self.block)
                )
            if full < x.numel():
                _quantize(x[full:].view(1, -1), scales[cut:], values[tail].view(1, -1))
        payload[: 4 * scales.numel()] = torch.from_numpy(scales.numpy().astype("<f4", copy=False).view(np.uint8))
        return payload.numpy().tobytes()

    def decode(self, payload: Payload, n: int) -> Tensor:
        """See `Compressor.decode`."""
        return self.decode_range(payload, n, 0, n)

    def decode_range(self, payload: Payload, n: int, start: int, stop: int) -> Tensor:
        """See `Compressor.decode_range`."""
        check_range(self.block, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        if start == stop:
            return torch.empty(0)
        first, last = start // self.block, self._num_blocks(stop)
        scales = np.frombuffer(view, "<f4", last - first, 4 * first)
        _check_scales(scales, first)
        factors = torch.from_numpy(scales.astype(np.float32))
        decoded = empty_vector(stop - start)
        for low, high in groups(start, stop, self.block, GROUP_ELEMENTS):
            values = np.frombuffer(view, np.int8, high - low, 4 * self._num_blocks(n) + low)
            if values.min() < -LEVELS:
                raise PayloadError(f"int8 payload holds -128 within values [{start}, {stop}); the limit is -{LEVELS}")
            blocks = factors[low // self.block - first : self._num_blocks(high) - first]
            _dequantize(blocks, values, decoded[low - start : high - start], self.block)
        return decoded

    def wire_bytes(self, n: int) -> int:
        """4 ceil(n / block) + n."""
        return 4 * self._num_blocks(n) + n

    def _num_blocks(self, n: int) -> int:
        return -(-n // self.block)


def _quantize(rows: Tensor, scales: Tensor, values: Tensor) -> None:
    """Fp32 [b, w] -> scales fp32 [b] and values int8 [b, w], both written in place."""
    largest = largest_magnitudes(rows)
    check_finite(largest, rows.numel())
    divisors = (largest / LEVELS).clamp_(_from_bits(_MIN_SCALE_BITS), _from_bits(_MAX_SCALE_BITS))
    scales.copy_(divisors.masked_fill(largest == 0, 0.0))
    # |row| / divisor exceeds 127 by rounding only, so that the nearest integer always fits.
    values.copy_((rows / divisors.unsqueeze(1)).round_())


def _dequantize(scales: Tensor, values: NDArray[np.int8], out: Tensor, block: int) -> None:
    out.copy_(torch.from_numpy(values.copy()))
    num_full = values.size // block
    out[: num_full * block].view(-1, block).mul_(scales[:num_full].unsqueeze(1))
    if values.size % block:
        out[num_full * block :].mul_(scales[num_full])


def _check_scales(scales: NDArray[np.float32], first_block: int) -> None:
    # On the bits, one comparison finds NaN, infinity, negative and subnormal scales, whatever the float mode.
    bits = scales.view("<i4")
    bad = (bits != 0) & ((bits < _MIN_SCALE_BITS) | (bits > _MAX_SCALE_BITS))
    if bad.any():
        worst = int(bad.argmax())
        limits = f"0 or from {_from_bits(_MIN_SCALE_BITS):g} to {_from_bits(_MAX_SCALE_BITS):g}"
        raise PayloadError(f"int8 payload: scale {scales[worst]} of block {first_block + worst} must be {limits}")


def _from_bits(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))
