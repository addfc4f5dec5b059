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
    NonFiniteError,
    Payload,
    PayloadError,
    Read,
    check_length,
    check_range,
    check_vector,
)

LEVELS = 127
_MIN_SCALE_BITS = 0x00800000  # 2^-126, the smallest normal fp32
_MAX_SCALE_BITS = 0x7C010203  # the largest fp32 that stays finite when multiplied by 127
_GROUP_ELEMENTS = 1 << 18  # temporaries of an encoding stay this small, and within the cache


@dataclass(frozen=True)
class BlockInt8:
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
        return self.encode_ranges(x.numel(), lambda start, stop: x[start:stop])

    def encode_ranges(self, n: int, read: Read) -> bytes:
        """See `Compressor.encode_ranges`."""
        scales = torch.empty(self._num_blocks(n))
        payload = bytearray(self.wire_bytes(n))
        if n == 0:
            return bytes(payload)
        values = torch.frombuffer(payload, dtype=torch.int8, count=n, offset=4 * scales.numel())
        group = max(1, _GROUP_ELEMENTS // self.block) * self.block
        for start in range(0, n, group):
            stop = min(start + group, n)
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
        payload[: 4 * scales.numel()] = scales.numpy().astype("<f4", copy=False).tobytes()
        return bytes(payload)

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
        values = np.frombuffer(view, np.int8, stop - start, 4 * self._num_blocks(n) + start)
        _check_scales(scales, first)
        if values.min() < -LEVELS:
            raise PayloadError(f"int8 payload holds -128 within values [{start}, {stop}); the limit is -{LEVELS}")
        return _dequantize(scales, values, self.block)

    def wire_bytes(self, n: int) -> int:
        """4 ceil(n / block) + n."""
        return 4 * self._num_blocks(n) + n

    def _num_blocks(self, n: int) -> int:
        return -(-n // self.block)


def _quantize(rows: Tensor, scales: Tensor, values: Tensor) -> None:
    """Fp32 [b, w] -> scales fp32 [b] and values int8 [b, w], both written in place."""
    largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
    if not bool(torch.isfinite(largest).all()):  # amax and amin pass NaN on
        raise NonFiniteError(f"cannot encode {rows.numel()} values: some are NaN or infinite")
    divisors = (largest / LEVELS).clamp_(_from_bits(_MIN_SCALE_BITS), _from_bits(_MAX_SCALE_BITS))
    scales.copy_(divisors).masked_fill_(largest == 0, 0.0)
    # |row| / divisor exceeds 127 by rounding only, so that the nearest integer always fits.
    values.copy_((rows / divisors.unsqueeze(1)).round_())


def _dequantize(scales: NDArray[np.float32], values: NDArray[np.int8], block: int) -> Tensor:
    decoded = torch.from_numpy(values.astype(np.float32))
    factors = torch.from_numpy(scales.astype(np.float32))
    num_full = values.size // block
    decoded[: num_full * block].view(-1, block).mul_(factors[:num_full].unsqueeze(1))
    if values.size % block:
        decoded[num_full * block :].mul_(factors[num_full])
    return decoded


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
