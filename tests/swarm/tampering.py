"""Reducers that do not reduce what they say: aggregators for one seat of an otherwise honest circle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from peer.outer.aggregate.base import Aggregator

TAMPERINGS = {
    "flipped": lambda mean, _: -mean,
    "a thousandfold": lambda mean, _: mean * 1000.0,
    "zero": lambda mean, _: torch.zeros_like(mean),
    "one contribution": lambda _, pieces: pieces[0].clone(),
    "one value": lambda mean, _: mean.index_put((torch.tensor(7),), mean.abs().max() * 2.0 + 1.0),
}


@dataclass(frozen=True)
class Tampering(Aggregator):
    """`inner`, but in the slices that `lies` names, by how many were reduced before, another result."""

    inner: Any
    lies: dict[int, str] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)

    @property
    def separable(self):
        return self.inner.separable

    def aggregate(self, contributions, weights):
        """As `inner`, or not."""
        mean = self.inner.aggregate(contributions, weights)
        lie = self.lies.get(len(self.calls))
        self.calls.append(len(weights))
        return mean if lie is None else TAMPERINGS[lie](mean, contributions)
