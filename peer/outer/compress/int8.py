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

from peer.outer.compress.base import PayloadError, check_finite, not_finite, read_bytes
from peer.outer.compress.blockwise import InBlocks
from peer.outer.compress.values import first_outside, largest_magnitudes
from peer.outer.numerics.kernels import Coded, kernels_for

LEVELS = 127
_MIN_SCALE_BITS = 0x00800000  # 2^-126, the smallest normal fp32
_MAX_SCALE_BITS = 0x7C010203  # the largest fp32 that stays finite when multiplied by 127
_SCALE_BITS = _MIN_SCALE_BITS, _MAX_SCALE_BITS
_MIN_SCALE, _MAX_SCALE = (float(np.uint32(bits).view(np.float32)) for bits in _SCALE_BITS)


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

    def _check(self, view: memoryview, n: int, start: int, rows: int, width: int) -> None:
        coded = self._coded(view, n, start, rows, width)
        if (kernels := kernels_for()) and kernels.fits(8, coded.scales, coded.codes, (rows, width), _SCALE_BITS):
            return
        _check_scales(np.frombuffer(coded.scales, "<u4"), start // self.block)
        if np.frombuffer(coded.codes, np.int8).min() < -LEVELS:
            stop = start + rows * width
            raise PayloadError(f"int8 payload holds -128 within values [{start}, {stop}); the limit is -{LEVELS}")

    def _read(self, view: memoryview, n: int, start: int, out: Tensor) -> None:
        coded = self._coded(view, n, start, *out.shape)
        if kernels := kernels_for(out):
            kernels.dequantize(8, coded.scales, coded.codes, out)
            return
        out.copy_(read_bytes(coded.codes, 0, *out.shape).view(torch.int8))
        out.mul_(read_bytes(coded.scales, 0, coded.rows, 4).view(torch.float32))

    def _coded(self, view: memoryview, n: int, start: int, rows: int, width: int) -> Coded:
        scales, values = self._offsets(n, start)
        written = view[scales : scales + 4 * rows], view[values : values + rows * width]
        return Coded(8, *written, rows, width, (_MIN_SCALE, _MAX_SCALE))

    def _offsets(self, n: int, start: int) -> tuple[int, int]:
        """Bytes before the scale and the value of element `start`, the first of a block."""
        return 4 * (start // self.block), 4 * -(-n // self.block) + start


def _quantize(rows: Tensor, scales: Tensor, values: Tensor) -> None:
    """Fp32 [b, w] -> scales fp32 [b] and values int8 [b, w], both written in place."""
    if kernels := kernels_for(rows):
        if not kernels.quantize(8, rows, _MIN_SCALE, _MAX_SCALE, scales, values):
            raise not_finite(rows.numel())
        return
    largest = largest_magnitudes(rows)
    check_finite(largest, rows.numel())
    divisors = (largest / LEVELS).clamp_(_MIN_SCALE, _MAX_SCALE)
    scales.copy_(divisors.masked_fill(largest == 0, 0.0))
    # |row| / divisor exceeds 127 by rounding only, so that the nearest integer always fits.
    values.copy_((rows / divisors.unsqueeze(1)).round_())


def _check_scales(bits: NDArray[np.uint32], first_block: int) -> None:
    worst = first_outside(bits, _MIN_SCALE_BITS, _MAX_SCALE_BITS)
    if worst is not None:
        limits = f"0 or from {_MIN_SCALE:g} to {_MAX_SCALE:g}"
        scale = bits.view("<f4")[worst]
        raise PayloadError(f"int8 payload: scale {scale} of block {first_block + worst} must be {limits}")
