"""Sixteen contributions of which four are bad."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.outer.contributions import gaussian


def attacked(attack: str, seed: int, numel: int = 1 << 16) -> tuple[list[Tensor], list[int], Tensor]:
    """16 contributions, the indices of the 4 bad among them, and the mean of the 12 honest (cosine .3)."""
    honest = gaussian(seed, 12, numel)
    stacked = torch.stack(honest)
    mean, spread = stacked.mean(dim=0), stacked.std(dim=0)
    generator = torch.Generator().manual_seed(seed + 1)
    bad = {
        "flip x1000": [-1000.0 * vector for vector in honest[:4]],
        "flip": [-vector for vector in honest[:4]],
        "flip below the gate": [-2.9 * vector for vector in honest[:4]],
        "inner product": [-0.5 * mean] * 4,
        "inner product x1000": [-1000.0 * mean] * 4,
        "a little is enough": [mean - 1.5 * spread + 0.3 * torch.randn(numel, generator=generator) for _ in range(4)],
        "a little, in copies": [mean - 1.5 * spread] * 4,
        "random x1000": [1000.0 * torch.randn(numel, generator=generator) for _ in range(4)],
        "largest values": [torch.full((numel,), 3e38)] * 4,
    }[attack]
    indices = [1, 6, 7, 15]
    contributions = list(honest)
    for index, vector in zip(indices, bad, strict=True):
        contributions.insert(index, vector)
    return contributions, indices, mean


ATTACKS = [
    "flip x1000",
    "flip",
    "flip below the gate",
    "inner product",
    "inner product x1000",
    "a little is enough",
    "a little, in copies",
    "random x1000",
    "largest values",
]
