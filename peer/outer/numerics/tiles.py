"""Tiles: as many elements of a vector as fit the cache, worked on one after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

TILE_ELEMENTS = 1 << 19  # temporaries of 2 MB: a smaller group pays more for calls, a larger one leaves the cache
ACCELERATOR_TILE_ELEMENTS = 1 << 24  # few launches, and temporaries of 64 MB


def tile_elements(device: torch.device) -> int:
    """Elements to work on at a time."""
    return TILE_ELEMENTS if device.type == "cpu" else ACCELERATOR_TILE_ELEMENTS


def tile_ranges(start: int, stop: int, block: int = 1, elements: int = TILE_ELEMENTS) -> Iterator[tuple[int, int]]:
    """[start, stop) cut into consecutive ranges of whole blocks, about `elements` long; the last may be shorter."""
    step = max(1, elements // block) * block
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
