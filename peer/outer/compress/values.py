"""How a row of values becomes scales and codes: the part that dense and sparse codecs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.compress.base import PayloadError, check_finite
from peer.outer.compress.bits import Bytes, tensor_of

MIN_NORMAL = 2.0**-126
MAX_BF16_BITS = 0x7F7F  # the largest finite bf16
FP32_INFINITY = 0x7F800000  # its bits


class Values(Protocol):
    """A quantizer of rows. Scales are 0 or normal bf16 numbers, so that flushing subnormals changes no decoded bit."""

    @property
    def name(self) -> str:
        """As in the expressions of the registry."""

    @property
    def bits(self) -> int:
        """Of one code."""

    @property
    def scale_bytes(self) -> int:
        """Of one row."""

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Fp32 [r, w] -> scales uint8 [r, scale_bytes], codes uint8 [r, ceil(w bits / 8)]; `rows` stays as it is.

        Raises:
            NonFiniteError: `rows` holds NaN or infinity.
        """

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:
        """Look at the bits of what is to be dequantized to rows of `width` values; uint8, shapes as in `quantize`.

        Raises:
            PayloadError: a scale or a code that `quantize` never writes.
        """

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:
        """The inverse, of what `check` let pass, into `out` (fp32 [r, w], contiguous, CPU), all finite."""


@dataclass(frozen=True)
class Fp32Values:
    """Fp32 as it is: error 0."""

    name: str = "fp32"
    bits: int = 32
    scale_bytes: int = 0

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        check_finite(largest_magnitudes(rows), rows.numel())
        return no_scales(rows), rows.contiguous().view(torch.uint8)

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:  # noqa: ARG002
        check_floats(codes, np.uint32, FP32_INFINITY, self.name)

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:  # noqa: ARG002
        out.copy_(tensor_of(codes).view(torch.float32))


@dataclass(frozen=True)
class HalfValues:
    """`fp16` or `bf16`, rounded to nearest even, saturating: finite input never becomes infinite.

    Error of x: at most 2^-11 |x| + 2^-25 up to 65504, and |x| - 65504 beyond (fp16); 2^-8 |x| + 2^-134 (bf16).
    """

    dtype: torch.dtype
    bits: int = 16
    scale_bytes: int = 0

    @property
    def name(self) -> str:
        """`fp16` or `bf16`."""
        return "fp16" if self.dtype == torch.float16 else "bf16"

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        check_finite(largest_magnitudes(rows), rows.numel())
        limit = torch.finfo(self.dtype).max
        return no_scales(rows), rows.clamp(-limit, limit).to(self.dtype).view(torch.uint8)

    def check(self, scales: Bytes, codes: Bytes, width: int) -> None:  # noqa: ARG002
        check_floats(codes, np.uint16, 0x7C00 if self.dtype == torch.float16 else 0x7F80, self.name)

    def dequantize(self, scales: Bytes, codes: Bytes, out: Tensor) -> None:  # noqa: ARG002
        out.copy_(tensor_of(codes).view(self.dtype))


def no_scales(rows: Tensor) -> Tensor:
    """Uint8 [r, 0]."""
    return torch.empty(rows.shape[0], 0, dtype=torch.uint8, device=rows.device)


def largest_magnitudes(rows: Tensor) -> Tensor:
    """Max |x| of each row: fp32 [r, w] -> [r]. NaN and infinity pass through."""
    return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())


def pack_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Non-negative fp32 [r, s] -> the nearest bf16 as bytes uint8 [r, 2 s], and what they decode to, fp32 [r, s].

    Below 2^-126 they become 0, above the largest bf16 that.
    """
    kept = scales.clamp(max=bf16_value(MAX_BF16_BITS)).masked_fill_(scales < MIN_NORMAL, 0.0).to(torch.bfloat16)
    return kept.view(torch.uint8), kept.float()


def unpack_scales(scales: Bytes) -> Tensor:
    """Uint8 [r, 2 s] -> fp32 [r, s]."""
    return (tensor_of(scales).view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def check_scales(scales: Bytes, codec: str, low: float = MIN_NORMAL, high_bits: int = MAX_BF16_BITS) -> None:
    """Refuse bf16 scales that are neither 0 nor within [low, the bf16 number of high_bits]; uint8 [r, 2 s].

    Raises:
        PayloadError: NaN, infinite, negative, subnormal or too large.
    """
    bits = scales.reshape(-1).view("<u2")
    worst = first_outside(bits, bf16_bits(low), high_bits)
    if worst is not None:
        limits = f"0 or from {low:g} to {bf16_value(high_bits):g}"
        raise PayloadError(f"{codec} payload: scale {bf16_value(int(bits[worst])):g} must be {limits}")


def first_outside(bits: NDArray[np.unsignedinteger[Any]], low: int, high: int) -> int | None:
    """The place of the first scale that is neither 0 nor within [low, high], by its bits; None if all are.

    On the bits, comparisons find NaN, infinity, negative and subnormal scales, whatever the float mode.
    """
    if bits.size == 0 or (bits.max() <= high and (bits - 1).min() >= low - 1):  # 0 wraps round to the largest
        return None
    return int(((bits != 0) & ((bits < low) | (bits > high))).argmax())


def check_floats(codes: Bytes, dtype: type[np.unsignedinteger[Any]], infinity: int, codec: str) -> None:
    """Refuse NaN and infinity, by the bits.

    Args:
        codes: any shape.
        dtype: of the bits of one float.
        infinity: the bits of plus infinity; minus infinity has the highest bit set as well.

    Raises:
        PayloadError: either is there.
    """
    unsigned = codes.reshape(-1).view(np.dtype(dtype).newbyteorder("<"))
    if unsigned.size == 0:
        return
    signed = unsigned.view(unsigned.dtype.str.replace("u", "i"))
    negative = infinity + (1 << (8 * unsigned.itemsize - 1))
    if signed.max() >= infinity or unsigned.max() >= negative:
        raise PayloadError(f"{codec} payload holds NaN or infinity within {unsigned.size} values")


def bf16_bits(value: float) -> int:
    """The 16 bits of a non-negative number, cut off to bf16."""
    return int(np.float32(value).view(np.uint32)) >> 16


def bf16_value(bits: int) -> float:
    """The number that these 16 bits mean as bf16."""
    return float(np.uint32(bits << 16).view(np.float32))
