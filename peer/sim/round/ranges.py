"""Fragments as ranges of a flat vector: taking them out, putting them back, and the shapes within."""

from __future__ import annotations

import torch
from torch import Tensor

from peer.outer.state.flat_layout import FlatLayout, Ranges


def take(flat: Tensor, ranges: Ranges) -> Tensor:
    """The elements of `ranges`, one after the other: a view when there is one range."""
    pieces = [flat[start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def put(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """The inverse of `take`."""
    position = 0
    for start, stop in ranges:
        flat[start:stop] = values[position : position + stop - start]
        position += stop - start


def length_of(ranges: Ranges) -> int:
    """How many elements they hold."""
    return sum(stop - start for start, stop in ranges)


def shapes_within(layout: FlatLayout, ranges: Ranges) -> list[tuple[int, ...]]:
    """Shapes of the tensors in `ranges`, which hold whole tensors."""
    shapes = []
    for start, stop in ranges:
        shapes += [
            shape for shape, offset in zip(layout.shapes, layout.offsets, strict=True) if start <= offset < stop
        ]
    return shapes
