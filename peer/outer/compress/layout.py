"""Where the blocks of a flat vector lie: tiles of its matrices, stretches of its vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from peer.outer.numerics.tiles import tile_ranges


@dataclass(frozen=True)
class Section:
    """A rectangle of the flat vector, cut into tiles of one size; a stretch is a rectangle with tiles of one row.

    Attributes:
        offset: of the first element.
        height: rows, a multiple of `tile_rows`.
        width: columns, a multiple of `tile_columns`.
        stride: elements from one row to the next.
    """

    offset: int
    height: int
    width: int
    stride: int
    tile_rows: int
    tile_columns: int

    @property
    def block(self) -> int:
        """Elements of one tile."""
        return self.tile_rows * self.tile_columns

    @property
    def num_blocks(self) -> int:
        """Tiles."""
        return self.height * self.width // self.block

    @property
    def per_band(self) -> int:
        """Tiles side by side."""
        return self.width // self.tile_columns

    def bands(self, elements: int) -> Iterator[tuple[int, int]]:
        """Ranges [first, last) of bands, rows of tiles, with about `elements` elements each."""
        return tile_ranges(0, self.height // self.tile_rows, 1, max(1, elements // (self.tile_rows * self.width)))

    def rectangle(self, x: Tensor, first: int, last: int) -> Tensor:
        """The bands [first, last) of the flat vector `x`, as a view [bands, tile_rows, width]."""
        band = self.tile_rows * self.stride
        return x.as_strided(
            (last - first, self.tile_rows, self.width),
            (band, self.stride, 1),
            x.storage_offset() + self.offset + first * band,
        )

    def cut(self, bands: Tensor) -> Tensor:
        """[bands, tile_rows, width], columns together -> the view [bands, tile_rows, per_band, tile_columns]."""
        return bands.view(bands.shape[0], self.tile_rows, self.per_band, self.tile_columns)

    def tiles(self, bands: Tensor) -> Tensor:
        """[bands, tile_rows, width] -> [blocks, tile_rows, tile_columns]; a copy unless tiles have one row."""
        return self.cut(bands).transpose(1, 2).reshape(-1, self.tile_rows, self.tile_columns)

    def untiled(self, tiles: Tensor) -> Tensor:
        """The inverse of `cut` and `tiles`, as a view [bands, tile_rows, per_band, tile_columns]."""
        return tiles.view(-1, self.per_band, self.tile_rows, self.tile_columns).transpose(1, 2)


@lru_cache(maxsize=64)
def tiled_sections(shapes: tuple[tuple[int, ...], ...], side: int, line: int) -> tuple[Section, ...]:
    """The sections of tensors that lie one after the other.

    Tensors of two and more dimensions are matrices [product of the leading ones, last], cut into tiles whose sides
    are the largest divisors up to `side` (arXiv 2411.19870); a dimension that has none above side / 2 is cut at
    `side` instead, its last tile shorter, so that a prime dimension does not mean tiles of one element. Tensors of
    one dimension are cut into stretches of `line`, the last one shorter.
    """
    sections: list[Section] = []
    offset = 0
    for shape in shapes:
        numel = math.prod(shape)
        if numel:
            sections += _matrix(offset, shape, side) if len(shape) > 1 else _stretches(offset, numel, line)
        offset += numel
    return tuple(sections)


def numel_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def _matrix(offset: int, shape: tuple[int, ...], side: int) -> list[Section]:
    height, width = math.prod(shape[:-1]), shape[-1]
    return [
        Section(offset + top * width + left, bottom - top, right - left, width, tile_rows, tile_columns)
        for top, bottom, tile_rows in _cuts(height, side)
        for left, right, tile_columns in _cuts(width, side)
    ]


def _stretches(offset: int, numel: int, line: int) -> list[Section]:
    full, rest = divmod(numel, line)
    sections = [Section(offset, full, line, line, 1, line)] if full else []
    return sections + ([Section(offset + full * line, 1, rest, rest, 1, rest)] if rest else [])


def _cuts(length: int, side: int) -> list[tuple[int, int, int]]:
    """[start, stop) ranges of a dimension, each with the side of its tiles."""
    divisor = max(d for d in range(1, min(side, length) + 1) if length % d == 0)
    if 2 * divisor > side or divisor == length:
        return [(0, length, divisor)]
    full = length // side * side
    return ([(0, full, side)] if full else []) + [(full, length, length - full)]
