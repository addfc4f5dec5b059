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

from peer.outer.compress.base import Payload, PayloadError, check_finite, check_length
from peer.outer.compress.blockwise import InBlocks
from peer.outer.compress.values import largest_magnitudes

LEVELS = 127
_MIN_SCALE_BITS = 0x00800000  # 2^-126, the smallest normal fp32
_MAX_SCALE_BITS = 0x7C010203  # the largest fp32 that stays finite when multiplied by 127


@dataclass(frozen=True)
class BlockInt8(InBlocks):
    """Symmetric int8 with scale = max |x| / 127 of each block.

    With m = max |x| of the block, the error of each value is at most max(m / 254, 2^-127) + 2^-22 m, where the last
    term is fp32 rounding. An all-zero block has scale 0 and decodes to zeros.
    """

    block: int = 256

    @property
    def name(self) -> str:
        """`int8`."""
        return "int8"

    def wire_bytes(self, n: int) -> int:
        """4 ceil(n / block) + n."""
        return 4 * -(-n // self.block) + n

    def _write(self, payload: Tensor, n: int, start: int, rows: Tensor) -> None:
        scales, values = self._offsets(n, start)
        _quantize(
            rows,
            payload[scales : scales + 4 * rows.shape[0]].view(torch.float32),
            payload[values : values + rows.numel()].view(torch.int8).view(rows.shape),
        )

    def _read(self, view: memoryview, n: int, start: int, out: Tensor) -> None:
        scale_offset, value_offset = self._offsets(n, start)
        scales = np.frombuffer(view, "<f4", out.shape[0], scale_offset)
        _check_scales(scales, start // self.block)
        values = np.frombuffer(view, np.int8, out.numel(), value_offset)
        _check_values(values, start)
        np.copyto(out.numpy(), values.reshape(out.shape))
        out.mul_(torch.from_numpy(scales.astype(np.float32)).unsqueeze(1))

    def check(self, payload: Payload, n: int) -> None:
        """See `Compressor.check`: the scales and the range of the values tell, without decoding."""
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        if n:
            scale_offset, value_offset = self._offsets(n, 0)
            _check_scales(np.frombuffer(view, "<f4", -(-n // self.block), scale_offset), 0)
            _check_values(np.frombuffer(view, np.int8, n, value_offset), 0)

    def _offsets(self, n: int, start: int) -> tuple[int, int]:
        """Bytes before the scale and the value of element `start`, the first of a block."""
        return 4 * (start // self.block), 4 * -(-n // self.block) + start


def _quantize(rows: Tensor, scales: Tensor, values: Tensor) -> None:
    """Fp32 [b, w] -> scales fp32 [b] and values int8 [b, w], both written in place."""
    largest = largest_magnitudes(rows)
    check_finite(largest, rows.numel())
    divisors = (largest / LEVELS).clamp_(_from_bits(_MIN_SCALE_BITS), _from_bits(_MAX_SCALE_BITS))
    scales.copy_(divisors.masked_fill(largest == 0, 0.0))
    # |row| / divisor exceeds 127 by rounding only, so that the nearest integer always fits.
    values.copy_((rows / divisors.unsqueeze(1)).round_())


def _check_values(values: NDArray[np.int8], start: int) -> None:
    if values.min() < -LEVELS:
        stop = start + values.size
        raise PayloadError(f"int8 payload holds -128 within values [{start}, {stop}); the limit is -{LEVELS}")


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
