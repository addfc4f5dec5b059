"""Symmetric levels around zero, relative to the largest magnitude of a row: `int8`, `int4` and `fp4`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from peer.outer.compress.base import PayloadError, check_finite, not_finite
from peer.outer.compress.bits import Bytes, byte_table, check_padding, lookup, pack, packed_bytes, tensor_of
from peer.outer.compress.values import (
    MAX_BF16_BITS,
    MIN_NORMAL,
    bf16_bits,
    bf16_value,
    check_scales,
    largest_magnitudes,
    unpack_scales,
)
from peer.outer.numerics.kernels import kernels_for

_MIN_SCALE_BITS = bf16_bits(MIN_NORMAL)
# by bits: the largest scale that stays finite when multiplied by the largest code
_MAX_SCALE_BITS = {bits: bf16_bits(torch.finfo(torch.float32).max / (2 ** (bits - 1) - 1)) for bits in (4, 8)}
INT4_SCALES = MIN_NORMAL, bf16_value(_MAX_SCALE_BITS[4])  # within which a scale is that is not 0


@dataclass(frozen=True)
class IntegerValues:
    """`int8` or `int4`: value = scale * q, |q| <= Q = 127 or 7, scale = bf16(max |x| / Q).

    With m = max |x| of the row, the error of each value is at most max((1 + 2^-7) m / 2 Q, 2^-127). Codes are two's
    complement; the most negative one is never written.
    """

    bits: int
    scale_bytes: int = 2

    @property
    def name(self) -> str:
        """`int8` or `int4`."""
        return f"int{self.bits}"

    @property
    def levels(self) -> int:
        """Q, the largest code."""
        return (1 << (self.bits - 1)) - 1

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.bits == 4 and (kernels := kernels_for(rows)):
            packed = torch.empty(rows.shape[0], 2, dtype=torch.uint8)
            codes = torch.empty(rows.shape[0], packed_bytes(rows.shape[1], 4), dtype=torch.uint8)
            if not kernels.quantize(4, rows, *INT4_SCALES, packed, codes):
                raise not_finite(rows.numel())
            return packed, codes
        scales = _scales(rows, self.levels, MIN_NORMAL, _MAX_SCALE_BITS[self.bits])
        quotients = (rows / _divisors(scales, MIN_NORMAL)).round_()
        if self.bits == 8:  # 127 m / bf16(m) can round to 128; 7 m / bf16(m) stays below 7.5
            quotients.clamp_(-self.levels, self.levels)
        return scales.view(torch.uint8), pack_signed(quotients.to(torch.int8), self.bits)

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:
        if self.bits == 4 and (kernels := kernels_for()):
            limits = _MIN_SCALE_BITS, _MAX_SCALE_BITS[self.bits]
            if kernels.fits(4, scales.data, codes.data, (len(codes), width), limits):
                return
        check_scales(scales, self.name, MIN_NORMAL, _MAX_SCALE_BITS[self.bits])
        if self.bits == 4:
            _check_nibbles(codes, width, self.name)
        elif codes.size and codes.view(np.int8).min() == -128:
            raise PayloadError("int8 payload holds -128; the limit is -127")

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:
        if self.bits == 4 and (kernels := kernels_for(out)):
            kernels.dequantize(4, scales.data, codes.data, out)
            return
        out.copy_(unpack_signed(codes, out.shape[1], self.bits))
        out.mul_(unpack_scales(scales))


@dataclass(frozen=True)
class Fp4Values:
    """`fp4`, E3M0: value = sign * scale * 2^(e - 7), e in 1..7, or 0; scale = bf16(max |x|) (arXiv 2501.18512).

    With m = max |x| of the row, the error of x is at most max(.34 |x|, .0118 m, 2^-126): the nearest power of two,
    and zero below three quarters of the smallest. Codes are sign * e in two's complement; -8 is never written.
    """

    name: str = "fp4"
    bits: int = 4
    scale_bytes: int = 2

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scales = _scales(rows, 1, _MIN_FP4_SCALE, MAX_BF16_BITS)
        # bf16 keeps the exponent in bits 7 to 14; half of bit 7 rounds it to the nearest power of two.
        bits = (rows / _divisors(scales, _MIN_FP4_SCALE)).to(torch.bfloat16).view(torch.int16)
        signs = bits >> 15
        exponents = bits.bitwise_and_(0x7FFF).add_(0x40 - (120 << 7)).bitwise_right_shift_(7).clamp_(min=0)
        codes = exponents.bitwise_xor_(signs).sub_(signs).to(torch.int8)
        return scales.view(torch.uint8), pack_signed(codes, 4)

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:
        check_scales(scales, self.name, _MIN_FP4_SCALE)
        _check_nibbles(codes, width, self.name)

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:
        lookup(codes, _fp4_table(), out)
        out.mul_(unpack_scales(scales))


_MIN_FP4_SCALE = 2.0**-120  # so that scale * 2^-6 is normal


def pack_signed(codes: Tensor, bits: int) -> Tensor:
    """Int8 [r, w] -> two's complement of 4 or 8 bits, uint8 [r, ceil(w bits / 8)]; overwrites `codes`."""
    if bits == 4:
        codes.bitwise_and_(15)
    return pack(codes.view(torch.uint8), bits)


def unpack_signed(packed: Bytes, width: int, bits: int) -> Tensor:
    """The inverse of `pack_signed`: int8 [r, width]; leaves `packed` as it is."""
    if bits == 8:
        return tensor_of(packed).view(torch.int8)
    wide = (packed ^ np.uint8(0x88)).astype(np.uint16)  # each code with 8 added
    wide |= wide << 4
    wide &= 0x0F0F  # a code in each byte
    codes = wide.view(np.int8)
    codes -= 8
    return torch.from_numpy(codes[:, :width])


def _check_nibbles(packed: Bytes, width: int, codec: str) -> None:
    if packed.size == 0:
        return
    # As signed bytes, those whose high nibble is -8 are the lowest sixteen; times 16 moves up the low nibble alone.
    if packed.view(np.int8).min() < -112 or np.multiply(packed, np.uint8(16)).view(np.int8).min() == -128:
        raise PayloadError(f"{codec} payload holds -8; the limit is -7")
    check_padding(packed, width, 4)


@lru_cache(maxsize=1)
def _fp4_table() -> Tensor:
    magnitudes = [2.0 ** (e - 7) for e in range(1, 8)]
    return byte_table([0.0, *magnitudes, 0.0, *(-m for m in reversed(magnitudes))])


def _scales(rows: Tensor, levels: int, low: float, high_bits: int) -> Tensor:
    """Bf16 [r, 1]: max |x| / levels within [low, high], or 0 for a row of zeros."""
    largest = largest_magnitudes(rows)
    check_finite(largest, rows.numel())
    scales = (largest / levels).clamp_(low, bf16_value(high_bits)).masked_fill_(largest == 0, 0.0)
    return scales.to(torch.bfloat16).unsqueeze(1)


def _divisors(scales: Tensor, low: float) -> Tensor:
    return scales.float().clamp_(min=low)
