"""Sums over elements whose order does not depend on threads or on how wide a processor's vectors are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from torch import Tensor

CHUNK: Final = 1 << 16  # elements at a time; part of the order of sums, hence of the last bits of results


def norm(x: Tensor) -> float:
    """The Euclidean norm of fp32 [n], in float64, where the square of no fp32 value rounds or overflows."""
    return math.sqrt(sum(float(fold(x[chunk].double().square_())) for chunk in chunks(x.numel())))


def dot(x: Tensor, y: Tensor) -> float:
    """The inner product of fp32 [n] each, in float64, where no product rounds."""
    return sum(float(fold(x[chunk].double() * y[chunk].double())) for chunk in chunks(x.numel()))


def chunks(numel: int) -> Iterator[slice]:
    """Consecutive slices of CHUNK elements; the last may be shorter."""
    return (slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))


def fold(x: Tensor) -> Tensor:
    """The sum over the last dimension, at least one long, by adding its halves: the same bits on every CPU."""
    while (length := x.shape[-1]) > 1:
        half = length // 2
        halves = x[..., :half] + x[..., half : 2 * half]
        if length % 2:
            halves[..., 0] += x[..., -1]
        x = halves
    return x[..., 0]
