"""A fragment as ranges of the flat vector; the whole model is one range."""

from __future__ import annotations

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""[start, stop) each, ascending."""


def length_of(ranges: Ranges) -> int:
    """How many elements they hold."""
    return sum(stop - start for start, stop in ranges)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The ranges of the elements [start, stop) of a fragment."""
    found, position = [], 0
    for first, last in ranges:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            found.append((first + low - position, first + high - position))
        position += last - first
    return tuple(found)


def take(flat: Tensor, ranges: Ranges) -> Tensor:
    """The elements of `ranges`, one after the other: a view when there is one range."""
    views = [flat[start:stop] for start, stop in ranges]
    return views[0] if len(views) == 1 else torch.cat(views) if views else flat[:0]


def put(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """The inverse of `take`."""
    position = 0
    for start, stop in ranges:
        flat[start:stop] = values[position : position + stop - start]
        position += stop - start
