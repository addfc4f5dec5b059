"""What the peers of a simulation learn: parameters as one flat vector, a gradient, a validation loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peer.data.batches import Batches, Resident
from peer.data.packing import PackedTokens
from peer.outer.state.flat_layout import FlatLayout
from peer.train.batch import Batch
from peer.train.evaluate import evaluate
from peer.train.loss import LanguageLoss


class Task(Protocol):
    """A problem that any number of peers learn, each on data of its own order."""

    @property
    def layout(self) -> FlatLayout:
        """Names and shapes of the parameters in the flat vector."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one peer learns from in one inner step."""

    def initial(self) -> Tensor:
        """A new fp32 [P]: the parameters at genesis."""

    def batches(self, peer: int) -> Iterator[Tensor]:
        """The batches of one peer, the same ones for every recipe; without end."""

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:
        """Write the mean gradient at `parameters` (fp32 [P]) into `out` (fp32 [P]) and return the mean loss."""

    def validate(self, parameters: Tensor, *, final: bool) -> float:
        """Loss on the validation data; the whole of it when `final`."""


class LanguageTask:
    """A transformers model on packed text. One module serves all peers: its parameters become views of theirs.

    Args:
        model: its own parameters give the initial vector.
        batch_sequences: of one inner step of one peer.
        data_seed: the peers' orders derive from it.
        interim_sequences: validation windows of an evaluation before the end.
        router_loss: see `LanguageLoss`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: PackedTokens,
        validation: PackedTokens,
        batch_sequences: int,
        data_seed: int,
        interim_sequences: int = 64,
        router_loss: float | None = None,
    ) -> None:
        self.layout = FlatLayout.of(model)
        self.tokens_per_step = batch_sequences * train.sequence_length
        self._model, self._loss = model, LanguageLoss(model, router_loss=router_loss)
        self._train, self._validation = train, validation
        self._batch_sequences, self._data_seed = batch_sequences, data_seed
        self._interim_sequences = interim_sequences
        self._initial = torch.empty(self.layout.numel)
        self.layout.copy_to_flat(model, self._initial)
        named = dict(model.named_parameters())
        self._parameters = [named[name] for name in self.layout.names]

    def initial(self) -> Tensor:
        return self._initial.clone()

    def batches(self, peer: int) -> Iterator[Tensor]:
        """See `Task.batches`; int64 [B, T + 1] each."""
        seed = 1_000_003 * self._data_seed + peer
        ordered = Batches([Resident(self._train)], self._batch_sequences, seed)
        return (batch for batch, _ in ordered)

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:
        out.zero_()
        for parameter, value, gradient in zip(
            self._parameters, self.layout.views(parameters), self.layout.views(out), strict=True
        ):
            parameter.data = value
            parameter.grad = gradient
        parts = Batch.of(batch, self._train.document_end)
        return self._loss.backward(parts, parts.tokens).item()

    def validate(self, parameters: Tensor, *, final: bool) -> float:
        """See `Task.validate`; nats per token."""
        for parameter, value in zip(self._parameters, self.layout.views(parameters), strict=True):
            parameter.data = value
        count = len(self._validation) if final else self._interim_sequences
        return evaluate(self._model, self._validation, count, 32)
