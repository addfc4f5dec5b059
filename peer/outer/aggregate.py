"""Contributions and weights -> one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_mean(contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i (w_i / sum w) x_i, added in the given order (McMahan et al. 2017, arXiv 1602.05629, algorithm 1).

    Args:
        contributions: fp32 [n] each, at least one; left unchanged.
        weights: one per contribution, in any common unit (token counts); normalised in float64, then cast to fp32.

    Returns:
        A new fp32 [n]. The mean of one contribution is that contribution, bit for bit.

    Raises:
        ValueError: no contributions, differing shapes or counts, or a weight that is not finite and above 0.
    """
    if not contributions or len(contributions) != len(weights):
        raise ValueError(f"{len(contributions)} contributions with {len(weights)} weights: must be equal and above 0")
    for index, (contribution, weight) in enumerate(zip(contributions, weights, strict=True)):
        if contribution.shape != contributions[0].shape:
            raise ValueError(f"contribution {index} has shape {tuple(contribution.shape)}, the first has another")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weights[{index}]={weight}: must be finite and above 0")
    total = float(sum(weights))
    if not math.isfinite(total):
        raise ValueError(f"the weights add up to {total}: must be finite")
    mean = torch.mul(contributions[0], weights[0] / total)
    for contribution, weight in zip(contributions[1:], weights[1:], strict=True):
        mean.add_(contribution * (weight / total))
    return mean
