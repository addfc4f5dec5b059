"""What one step learns from, and how it is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that nothing is learned from; torch's own default


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one step, int64 [B, T] each; a label of `IGNORED` counts for nothing."""

    inputs_bt: Tensor
    labels_bt: Tensor

    @classmethod
    def of(cls, batch: Batch | Tensor) -> Batch:
        """A batch as it is, or windows, int64 [B, T + 1]: the first T tokens are inputs, the last T labels."""
        return batch if isinstance(batch, Batch) else cls(batch[:, :-1], batch[:, 1:])

    @cached_property
    def tokens(self) -> int:
        """How many tokens are learned from."""
        return int((self.labels_bt != IGNORED).sum())

    def micro_batches(self, sequences: int) -> list[Batch]:
        """Consecutive cuts of so many sequences; the last one may have fewer."""
        cuts = zip(torch.split(self.inputs_bt, sequences), torch.split(self.labels_bt, sequences), strict=True)
        return [Batch(inputs, labels) for inputs, labels in cuts]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved = Batch(self.inputs_bt.to(device, non_blocking=True), self.labels_bt.to(device, non_blocking=True))
        moved.__dict__["tokens"] = self.tokens  # counted here: there it would stall the device
        return moved
