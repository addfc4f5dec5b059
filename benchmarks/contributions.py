"""The vectors that `benchmarks.exchange` averages: each process makes its own, and knows the mean of all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 25_013  # elements; a prime, so that a part which lands in another place does not pass for the right one
SCALES = 5


def fill(vector: Tensor, index: int, seed: int) -> None:
    """Make `vector` (fp32 [P]) the contribution of member `index`: Gaussian tiles in turns of SCALES scales."""
    base = _base(index, seed)
    for start, stop, scale in _tiles(vector.numel()):
        torch.mul(base[: stop - start], scale, out=vector[start:stop])


def relative_error(vector: Tensor, num_members: int, seed: int) -> float:
    """Distance of `vector` (fp32 [P]) from the mean of all contributions, over the norm of one contribution.

    For a contribution that was not averaged it is sqrt(1 - 1/N), at least 0.7. NaN if the vector holds any.
    """
    mean = _base(0, seed)
    for index in range(1, num_members):  # one after another: whose memory is looked at must not hold them all
        mean += _base(index, seed)
    mean /= num_members
    off = size = 0.0
    for start, stop, scale in _tiles(vector.numel()):
        difference = vector[start:stop].sub(mean[: stop - start], alpha=scale)
        off += difference.square_().sum(dtype=torch.float64).item()
        size += scale**2 * (stop - start)
    return math.sqrt(off / size)


def _base(index: int, seed: int) -> Tensor:
    return torch.randn(TILE, generator=torch.Generator().manual_seed(1000 * seed + index))


def _tiles(numel: int) -> Iterator[tuple[int, int, float]]:
    for number, start in enumerate(range(0, numel, TILE)):
        yield start, min(start + TILE, numel), 1.0 + (number % SCALES) / SCALES
