"""What one step learns from, and how it is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ID_MASK, UNLEARNED = (1 << 24) - 1, 1 << 24  # of tokens in windows, as `peer.data.encode` writes them
IGNORED = -100  # the label of a token that nothing is learned from; torch's own default


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one step, int64 [B, T] each; a label of `IGNORED` counts for nothing.

    Attributes:
        positions_bt: of the tokens in their documents, int64 [B, T], where attention stays inside a document. A 0
            begins another one: transformers makes the block mask of that, or the lengths for flash attention.
    """

    inputs_bt: Tensor
    labels_bt: Tensor
    positions_bt: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch | Tensor, document_end: int | None = None) -> Batch:
        """A batch as it is, or windows, int64 [B, T + 1]: the first T tokens are inputs, the last T labels.

        A token marked UNLEARNED is no label; an end token with any other mark ends no document.

        Args:
            document_end: the token after which another document begins. What follows it is not predicted from it.
        """
        if isinstance(batch, Batch):
            return batch
        inputs_bt, labels_bt = batch[:, :-1] & ID_MASK, batch[:, 1:] & ID_MASK
        labels_bt = labels_bt.masked_fill((batch[:, 1:] & UNLEARNED) != 0, IGNORED)
        if document_end is None:
            return cls(inputs_bt, labels_bt)
        ends_bt = (batch[:, :-1] & ~UNLEARNED) == document_end
        return cls(inputs_bt, labels_bt.masked_fill(ends_bt, IGNORED), positions_in_documents(ends_bt))

    @cached_property
    def tokens(self) -> int:
        """How many tokens are learned from."""
        return int((self.labels_bt != IGNORED).sum())

    def counting(self, tokens: int) -> Batch:
        """This batch, whose mean is over so many tokens."""
        self.__dict__["tokens"] = tokens
        return self

    def first(self, sequences: int) -> Batch:
        """The first so many sequences."""
        positions_bt = None if self.positions_bt is None else self.positions_bt[:sequences]
        return Batch(self.inputs_bt[:sequences], self.labels_bt[:sequences], positions_bt)

    def micro_batches(self, sequences: int) -> list[Batch]:
        """Consecutive cuts of so many sequences; the last one may have fewer."""
        inputs, labels = torch.split(self.inputs_bt, sequences), torch.split(self.labels_bt, sequences)
        if self.positions_bt is None:
            return [Batch(*cut) for cut in zip(inputs, labels, strict=True)]
        return [Batch(*cut) for cut in zip(inputs, labels, torch.split(self.positions_bt, sequences), strict=True)]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        positions_bt = None if self.positions_bt is None else self.positions_bt.to(device, non_blocking=True)
        inputs_bt, labels_bt = (part.to(device, non_blocking=True) for part in (self.inputs_bt, self.labels_bt))
        # Counted here: there it would stall the device.
        return Batch(inputs_bt, labels_bt, positions_bt).counting(self.tokens)


def positions_in_documents(ends_bt: Tensor) -> Tensor:
    """The position of each token in its document, int64 [B, T]; one begins at the start of a row and after each end."""
    places_bt = torch.arange(ends_bt.shape[1], device=ends_bt.device).expand_as(ends_bt)
    begins_bt = torch.where(ends_bt, places_bt + 1, 0).roll(1, dims=1)
    begins_bt[:, 0] = 0
    return places_bt - begins_bt.cummax(dim=1).values
