"""Inner products of a few long vectors: exact in integers, so that every machine gets the same bits, and fast.

Each vector is rounded to 16 bits by a power of two of its own. Products of such integers, and sums of up to 2^23 of
them, are integers below 2^53, which float64 holds exactly: a matrix product may add them in any order, with fused
operations or without, on any number of threads. The rounding is by at most 2^-16 of the largest magnitude, so that the
norm of 2^19 values is off by at most 1.2% however they are chosen, and a cosine by about as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from peer.outer.numerics.kernels import kernels_for
from peer.outer.numerics.ordered_sums import chunks

_BITS: Final = 15
_LARGEST_SHIFT: Final = 126  # 2^127 and what is smaller than 2^-126 are at the edge of fp32

Products = list[list[float]]


def largest_magnitude(x: Tensor) -> float:
    """The largest magnitude of fp32 [n]: NaN or infinite if any value is; 0 for no values."""
    if x.numel() == 0:
        return 0.0
    if kernels := kernels_for(x):
        return kernels.largest(x)
    low, high = (float(value) for value in torch.aminmax(x))
    return max(abs(low), abs(high)) if low == low else math.nan


def inner_products(vectors: Sequence[Tensor], magnitudes: Sequence[float]) -> Products:
    """The inner products of all pairs.

    Args:
        vectors: fp32 [n] each, finite.
        magnitudes: `largest_magnitude` of each.
    """
    count, shifts = len(vectors), [_shift(magnitude) for magnitude in magnitudes]
    if not count:
        return []
    scales = [2.0**shift for shift in shifts]
    total = torch.zeros(count, count, dtype=torch.float64)
    for chunk in chunks(vectors[0].numel()):
        total.add_(_of_integers([x[chunk] for x in vectors], scales))
    return [
        [math.ldexp(value, -shifts[i] - shifts[j]) for j, value in enumerate(row)]
        for i, row in enumerate(total.tolist())
    ]


def _of_integers(vectors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """fp64 [count, count]: the inner products of the vectors times their scales, rounded, ties to even."""
    if kernels := kernels_for(*vectors):
        return kernels.inner_products(vectors, scales)
    rounded = torch.stack([x * scale for x, scale in zip(vectors, scales, strict=True)]).round_().double()
    return rounded @ rounded.T  # integers: exact in any order


def _shift(magnitude: float) -> int:
    """The power of two that brings `magnitude` to [2^14, 2^15)."""
    if magnitude == 0.0:
        return 0
    return min(_LARGEST_SHIFT, max(-_LARGEST_SHIFT, _BITS - math.frexp(magnitude)[1]))
