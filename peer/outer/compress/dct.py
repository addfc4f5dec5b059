"""The orthonormal discrete cosine transform (DCT-II) of small blocks, as a product with a cached matrix.

The inverse is integer arithmetic in fp64 in which no partial sum is ever rounded, and hence gives the same bits on
every machine, whatever order a matrix product adds in: a power of two makes the coefficients of a block integers with
a norm of at most 2^28, matrix entries are multiples of 2^-24, and as the matrix is orthonormal, no sum of a part of a
row's products exceeds the norm. Between rows and columns, values are rounded to integers again.
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
_NORM_BITS = 28
_SQUARE_BITS = 20  # squares of 4096 numbers of 20 bits add up exactly in fp64
_SPARSE_LIMIT = 4  # coefficients per row of a tile, up to which adding cosines beats a matrix product (measured)
_SMALLEST_EXPONENT = -73  # blocks of a smaller norm become zero, so that no decoded value is a subnormal number
_LARGEST_EXPONENT = 127  # values are at most as large as the norm of their block: finite in fp32 below 2^127


@dataclass(frozen=True)
class Cosine:
    """The transform of tiles [r, c], r and c from 1 to 64: columns first, then rows; of stretches [1, c], rows only.

    Forward, it is as exact as torch's products of fp32 matrices, on accelerators a setting of the process (TF32).
    """

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
        scales = power_of_two(exponents - _NORM_BITS).view(num_bands, 1, per_band, 1)
        bands = tiles.view(num_bands, per_band, rows, columns).transpose(1, 2).reshape(num_bands, rows, -1)
        if rows > 1:
            bands = torch.matmul(_exact_matrix(rows).T, bands)
        out.copy_(bands.view(out.shape).mul_(scales))
        if int(exponents.max()) > _LARGEST_EXPONENT and not is_finite(out):
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
    """Coefficients fp32 [t, k] of t blocks -> integers fp64 [t, k], norms up to 2^28, and exponents int64 [t].

    Block i is its integers times 2^(exponents[i] - 28), rounded.
    """
    wide = values.to(torch.float64)
    tops = torch.frexp(wide.abs().amax(dim=1)).exponent.to(torch.int64)  # all |values| < 2^top
    parts = (wide * power_of_two(_SQUARE_BITS - tops).unsqueeze(1)).round_()
    squares = torch.frexp(parts.square_().sum(dim=1)).exponent.to(torch.int64)  # exact, so the same everywhere
    exponents = tops - _SQUARE_BITS + torch.div(squares + 1, 2, rounding_mode="floor")  # norm < 2^exponent
    factors = power_of_two(_NORM_BITS - exponents).masked_fill_(exponents < _SMALLEST_EXPONENT, 0.0)
    return wide.mul_(factors.unsqueeze(1)).round_(), exponents


def _inverse_rows(places: Tensor | None, integers: Tensor, rows: int, columns: int) -> Tensor:
    """Integers [t, k] of `_to_integers` at their places -> the inverse of each row, rounded to integers.

    fp64 [t, rows, columns], norms of tiles up to 2^28.
    """
    num_tiles, kept = integers.shape
    matrix = _exact_matrix(columns)
    if places is None:
        product = torch.matmul(integers.view(-1, columns), matrix)
    elif kept > _SPARSE_LIMIT * rows:
        tiles = torch.zeros(num_tiles, rows * columns, dtype=torch.float64).scatter_(1, places, integers)
        product = torch.matmul(tiles.view(-1, columns), matrix)
    else:  # few coefficients: add up their cosines
        cosines = matrix.index_select(0, (places % columns).flatten()).mul_(integers.view(-1, 1))
        row_of = torch.div(places, columns, rounding_mode="floor")
        row_of += torch.arange(0, num_tiles * rows, rows).unsqueeze(1)
        product = torch.zeros(num_tiles * rows, columns, dtype=torch.float64)
        product.index_add_(0, row_of.flatten(), cosines)
    return product.round_().view(-1, rows, columns)
