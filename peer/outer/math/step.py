"""The outer step of a fragment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peer.outer.math.ranges import Ranges, length_of, put, take, within
from peer.outer.numerics.kernels import Coded
from peer.outer.numerics.ordered_sums import norm
from peer.outer.numerics.tiles import tile_ranges
from peer.outer.optim.optimizers import OuterOptimizer, Vectors


class Aggregate(Protocol):
    """The aggregated pseudo-gradient D of a fragment, which may still lie in its payloads."""

    @property
    def numel(self) -> int:
        """Elements of the fragment."""

    def decode_range(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of D as fp32 [stop - start], to be read only."""

    def coded(self, start: int, stop: int) -> Sequence[Coded] | None:
        """What a compiled loop reads in place of `decode_range`; None where no loop reads it."""


@dataclass(frozen=True)
class Decoded:
    """An `Aggregate` that has been decoded: fp32 [n]."""

    vector: Tensor

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.vector.numel()

    def decode_range(self, start: int, stop: int) -> Tensor:
        return self.vector[start:stop]

    def coded(self, start: int, stop: int) -> None:
        """See `Aggregate.coded`."""


@dataclass(frozen=True)
class Scaled:
    """An `Aggregate` times a factor."""

    of: Aggregate
    factor: float

    @property
    def numel(self) -> int:
        """Elements of the fragment."""
        return self.of.numel

    def decode_range(self, start: int, stop: int) -> Tensor:
        return self.of.decode_range(start, stop) * self.factor

    def coded(self, start: int, stop: int) -> None:
        """See `Aggregate.coded`."""


def clip_factor(aggregate: Aggregate, max_norm: float) -> float:
    """What clips the aggregate of a whole vector, as `torch.nn.utils.clip_grad_norm_` does: the same bits on every CPU.
    """
    norms = [norm(aggregate.decode_range(*tile)) for tile in tile_ranges(0, aggregate.numel)]
    return min(1.0, max_norm / (math.sqrt(sum(one * one for one in norms)) + 1e-6))


def step_(
    optimizer: OuterOptimizer, vectors: Vectors, ranges: Ranges, aggregate: Aggregate, *,
    start: int = 0, round: int = 0, lr_scale: float = 1.0,
) -> None:
    """Take the outer step of some elements of a fragment, in place.

    Args:
        optimizer: of the recipe.
        vectors: anchor and buffers; fp32.
        ranges: where in these vectors the elements lie, one range after the other.
        aggregate: of the fragment.
        start: the first of the elements within the fragment: a multiple of TILE_ELEMENTS.
        round, lr_scale: see `OuterOptimizer.step`.
    """
    numel = length_of(ranges)
    for first, last in tile_ranges(0, numel) if optimizer.elementwise else ((0, numel),):
        parts = within(ranges, first, last)
        tile = Vectors(take(vectors.anchor, parts), [take(buffer, parts) for buffer in vectors.buffers])
        coded = aggregate.coded(start + first, start + last)
        if coded is None or not optimizer.step_coded(tile, coded, tile, round=round, lr_scale=lr_scale):
            values = aggregate.decode_range(start + first, start + last)
            optimizer.step(tile, values, tile, round=round, lr_scale=lr_scale, start=start + first)
        if len(parts) > 1:  # copies were taken
            for flat, values in zip((vectors.anchor, *vectors.buffers), (tile.anchor, *tile.buffers), strict=True):
                put(flat, parts, values)
