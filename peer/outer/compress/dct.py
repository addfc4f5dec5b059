"""The orthonormal discrete cosine transform (DCT-II) of small blocks, as a product with a cached matrix.

The inverse is integer arithmetic in fp64 without a rounding error that depends on the order in which a matrix product
adds, and hence gives the same bits on every machine: coefficients become integers of up to 2^25 times a power of two
for each block, matrix entries multiples of 2^-24, and rows of the matrix add up to 8 at most, so that every partial
sum is a multiple of 2^-27 below 2^26.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from peer.outer.compress.base import PayloadError, is_finite

MAX_SIDE = 64
_MATRIX_BITS = 24
_VALUE_BITS = 25
_GROWTH_BITS = 3  # log2 of 8, the square root of MAX_SIDE
_SPARSE_LIMIT = 4  # coefficients per row of a tile, up to which adding cosines beats a matrix product (measured)
_SMALLEST_EXPONENT = -76  # blocks below 2^-76 become zero, so that no decoded value is a subnormal number
_SAFE_EXPONENT = 120  # decoded values are at most 64 times the largest coefficient: finite below 2^120


@dataclass(frozen=True)
class Cosine:
    """The transform of tiles [r, c], r and c from 1 to 64: columns first, then rows; of stretches [1, c], rows only."""

    def columns(self, bands: Tensor) -> Tensor:
        """Fp32 [b, r, w] -> the transform of each column of r values; not bit-identical on all machines."""
        return bands if bands.shape[1] == 1 else torch.matmul(_matrix(bands.shape[1], bands.device), bands)

    def rows(self, tiles: Tensor) -> Tensor:
        """Fp32 [t, r, c] -> the transform of each row of c values; not bit-identical on all machines."""
        size = tiles.shape[2]
        return torch.matmul(tiles.reshape(-1, size), _matrix(size, tiles.device).T).view(tiles.shape)

    def inverse(self, places: Tensor | None, values: Tensor, out: Tensor) -> None:
        """Kept coefficients -> values, the same bits on every machine, within 1e-6 of the norm of the block.

        Args:
            places: int64 [t, k], within the tiles; None if all coefficients are kept.
            values: fp32 [t, k].
            out: fp32 [bands, r, tiles in a band, c] with bands * tiles in a band = t, any strides; written.

        Raises:
            PayloadError: a decoded value beyond fp32's range.
        """
        num_bands, rows, per_band, columns = out.shape
        integers, exponents = _to_integers(values)
        tiles = _inverse_rows(places, integers, rows, columns)
        units = 2.0 ** (_GROWTH_BITS - _VALUE_BITS)
        scales = power_of_two(exponents).mul_(units).view(num_bands, 1, per_band, 1)
        bands = tiles.view(num_bands, per_band, rows, columns).transpose(1, 2).reshape(num_bands, rows, -1)
        if rows > 1:
            bands = torch.matmul(_exact_matrix(rows).T, bands)
        out.copy_(bands.view(out.shape).mul_(scales))
        if int(exponents.max()) > _SAFE_EXPONENT and not is_finite(out):
            raise PayloadError("cosine coefficients of values beyond fp32's range")


def power_of_two(exponents: Tensor) -> Tensor:
    """Int64, each from -1022 to 1023 -> fp64 2^exponent, exact, which `pow` need not be."""
    return ((exponents + 1023) << 52).view(torch.float64)


@lru_cache(maxsize=128)
def _entries(size: int) -> tuple[tuple[float, ...], ...]:
    assert 1 <= size <= MAX_SIDE, f"size={size}: must be from 1 to {MAX_SIDE}"
    first = (math.sqrt(1.0 / size),) * size
    others = (
        tuple(math.sqrt(2.0 / size) * math.cos(math.pi * (2 * i + 1) * k / (2 * size)) for i in range(size))
        for k in range(1, size)
    )
    return (first, *others)


@lru_cache(maxsize=128)
def _matrix(size: int, device: torch.device) -> Tensor:
    """[size, size] fp32: row k is the k-th cosine."""
    return torch.tensor(_entries(size), dtype=torch.float64).float().to(device)


@lru_cache(maxsize=128)
def _exact_matrix(size: int) -> Tensor:
    """[size, size] fp64, multiples of 2^-24."""
    unit = 2.0**_MATRIX_BITS
    return torch.tensor(_entries(size), dtype=torch.float64).mul_(unit).round_().div_(unit)


def _to_integers(values: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients fp32 [t, k] of t blocks -> integers up to 2^25 as fp64 [t, k], and exponents int64 [t].

    Block i is its integers times 2^(exponents[i] - 25), rounded.
    """
    largest = values.abs().amax(dim=1).to(torch.float64)
    exponents = torch.frexp(largest).exponent.to(torch.int64)  # largest < 2^exponent
    factors = power_of_two(_VALUE_BITS - exponents).masked_fill_(exponents < _SMALLEST_EXPONENT, 0.0)
    return values.to(torch.float64).mul_(factors.unsqueeze(1)).round_(), exponents


def _inverse_rows(places: Tensor | None, integers: Tensor, rows: int, columns: int) -> Tensor:
    """Integers [t, k] of `_to_integers` at their places -> an eighth of the inverse of each row, rounded to integers.

    fp64 [t, rows, columns], magnitudes up to 2^25.
    """
    num_tiles, kept = integers.shape
    eighths = integers.mul_(2.0**-_GROWTH_BITS)
    matrix = _exact_matrix(columns)
    if places is None:
        product = torch.matmul(eighths.view(-1, columns), matrix)
    elif kept > _SPARSE_LIMIT * rows:
        tiles = torch.zeros(num_tiles, rows * columns, dtype=torch.float64).scatter_(1, places, eighths)
        product = torch.matmul(tiles.view(-1, columns), matrix)
    else:  # few coefficients: add up their cosines
        cosines = matrix.index_select(0, (places % columns).flatten()).mul_(eighths.view(-1, 1))
        row_of = torch.div(places, columns, rounding_mode="floor")
        row_of += torch.arange(0, num_tiles * rows, rows).unsqueeze(1)
        product = torch.zeros(num_tiles * rows, columns, dtype=torch.float64)
        product.index_add_(0, row_of.flatten(), cosines)
    return product.round_().view(-1, rows, columns)
