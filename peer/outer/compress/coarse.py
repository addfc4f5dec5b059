"""One and two bits a value: `sign` and `int2`. Both shrink: the error of a row is no longer than the row itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from peer.outer.compress.base import PayloadError, check_finite
from peer.outer.compress.bits import Bytes, byte_table, check_padding, lookup, pack, packed_bytes
from peer.outer.compress.values import (
    MAX_BF16_BITS,
    MIN_NORMAL,
    bf16_value,
    check_scales,
    pack_scales,
    unpack_scales,
)
from peer.outer.numerics.kernels import kernels_for
from peer.outer.numerics.ordered_sums import fold

INT2_SCALES = MIN_NORMAL, bf16_value(MAX_BF16_BITS)  # within which a scale is that is not 0
_LLOYD_STEPS = 2
_MEAN_PART = 0.8  # the first cut is 80% mean, 20% maximum: good for light and heavy tails after two steps (measured)


@dataclass(frozen=True)
class SignValues:
    """`sign`: value = +-scale, scale = bf16(mean |x|) of the row (arXiv 1802.04434 with the mean of 1901.09847).

    With m = max |x|, the error of each value is at most (1 + 2^-8) m + 2^-126, and the norm of the error at most
    1 + 2^-8 times the norm of the row. Zero has the sign of its bit.
    """

    name: str = "sign"
    bits: int = 1
    scale_bytes: int = 2

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        sums = _sums(rows.abs())
        scales, _ = pack_scales((sums / rows.shape[1]).float().unsqueeze(1))
        return scales, pack(_sign_bits(rows), 1)

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:
        check_scales(scales, self.name)
        check_padding(codes, width, 1)

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:
        lookup(codes, _sign_table(), out)
        out.mul_(unpack_scales(scales))


@dataclass(frozen=True)
class Int2Values:
    """`int2`: value = sign * {low, high}, two bf16 magnitudes fitted to the row by two of Lloyd's steps.

    Fitted levels serve Gaussian rows (relative error .345, as {.5, 1.5} times the best delta), heavy tails (Student
    t3: .48) and the large values of a top-k (64 of 4096 Gaussian ones: .06) alike. With m = max |x|, the error of each
    value is at most (1 + 2^-8) m + 2^-126, and the norm of the error at most 1 + 2^-8 times the row's norm. Bit 0 of
    a code is the sign, bit 1 the level.
    """

    name: str = "int2"
    bits: int = 2
    scale_bytes: int = 4

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if kernels := kernels_for(rows):
            scales = torch.empty(rows.shape[0], 4, dtype=torch.uint8)
            codes = torch.empty(rows.shape[0], packed_bytes(rows.shape[1], 2), dtype=torch.uint8)
            if kernels.quantize(2, rows, *INT2_SCALES, scales, codes):
                return scales, codes
        magnitudes = rows.abs()
        sums, width = _sums(magnitudes), rows.shape[1]
        largest = magnitudes.amax(dim=1).mul_(1.0 - _MEAN_PART)
        cut = (sums * (_MEAN_PART / width)).float().add_(largest).unsqueeze(1)
        for _ in range(_LLOYD_STEPS):
            above = _above(magnitudes, cut)
            count = above.sum(dim=1)
            high_sum = fold(above.mul_(magnitudes).to(sums.dtype))
            low = (sums - high_sum).clamp_(min=0) / (width - count).clamp_(min=1)
            high = torch.maximum(high_sum / count.clamp_(min=1), low)  # none above, or rounding
            levels = torch.stack((low, high), dim=1).float()
            cut = levels.mean(dim=1, keepdim=True, dtype=torch.float64).float()
        scales, _ = pack_scales(levels)
        codes = _above(magnitudes, cut).to(torch.uint8).mul_(2).bitwise_or_(_sign_bits(rows))
        return scales, pack(codes, 2)

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:
        check_scales(scales, self.name)
        levels = scales.view("<u2")  # bits of numbers that are not negative are ordered like the numbers
        if (levels[:, 0] > levels[:, 1]).any():
            raise PayloadError("int2 payload: a low level is above its high level")
        check_padding(codes, width, 2)

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:
        if kernels := kernels_for(out):
            kernels.dequantize(2, scales.data, codes.data, out)
            return
        levels = unpack_scales(scales)
        high = torch.empty_like(out)
        lookup(codes, _level_table(0), out)
        lookup(codes, _level_table(1), high)
        out.mul_(levels[:, :1]).add_(high.mul_(levels[:, 1:]))  # one of the two is zero


@lru_cache(maxsize=1)
def _sign_table() -> Tensor:
    return byte_table([1.0, -1.0])


@lru_cache(maxsize=2)
def _level_table(level: int) -> Tensor:
    return byte_table([1.0 - level, -(1.0 - level), float(level), -float(level)])


def _above(magnitudes: Tensor, cut: Tensor) -> Tensor:
    """1.0 where greater than `cut`, else 0.0: torch does not vectorise comparisons."""
    return (magnitudes - cut).sign_().clamp_(min=0)


def _sums(magnitudes: Tensor) -> Tensor:
    """Sum of each row [r, w] -> [r], fp32, or fp64 where that overflows in one of them; the same bits on every CPU.

    Raises:
        NonFiniteError: NaN or infinity.
    """
    sums = fold(magnitudes)
    if not bool(torch.isfinite(sums).all()):
        sums = fold(magnitudes.double())
        check_finite(sums, magnitudes.numel())
    return sums


def _sign_bits(rows: Tensor) -> Tensor:
    """Uint8 [r, w]: 1 for negative values, -0.0 among them."""
    return (rows.view(torch.int32) >> 31).to(torch.uint8).bitwise_and_(1)
