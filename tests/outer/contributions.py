"""Contributions as honest peers make them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gaussian(seed: int, count: int, numel: int, cosine: float = 0.3) -> list[Tensor]:
    """Vectors of norm about sqrt(numel) whose pairwise cosine is about `cosine`."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator) * math.sqrt(cosine)
    return [common + torch.randn(numel, generator=generator) * math.sqrt(1.0 - cosine) for _ in range(count)]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))
