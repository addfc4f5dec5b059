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
from peer.sim.learner.recorded import RecordedPasses
from peer.train.batch import Batch
from peer.train.evaluate import evaluate
from peer.train.loss import LanguageLoss

CPU = torch.device("cpu")
INTERIM_SEQUENCES = 64  # validation windows of an evaluation before the end


class Task(Protocol):
    """A problem that any number of peers learn, each on data of its own order."""

    @property
    def layout(self) -> FlatLayout:
        """Names and shapes of the parameters in the flat vector."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one peer learns from in one inner step."""

    @property
    def device(self) -> torch.device:
        """Where gradients are computed."""

    def initial(self) -> Tensor:
        """A new fp32 [P]: the parameters at genesis."""

    def batches(self, peer: int) -> Iterator[Tensor]:
        """The batches of one peer, the same ones for every recipe; without end."""

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:
        """Write the mean gradient at `parameters` into `out` (fp32 [P], on the device) and return the mean loss."""

    def validate(self, parameters: Tensor, *, final: bool) -> float:
        """Loss on the validation data at `parameters` (fp32 [P] in RAM); the whole of it when `final`."""


class LanguageTask:
    """A transformers model on packed text. One module serves all peers: its parameters become views of theirs.

    Args:
        model: its own parameters give the initial vector.
        batch_sequences: of one inner step of one peer.
        data_seed: the peers' orders derive from it.
        router_loss: see `LanguageLoss`.
        device: where the model computes. On a CUDA device the passes of a batch are recorded once and replayed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: PackedTokens,
        validation: PackedTokens,
        batch_sequences: int,
        data_seed: int,
        router_loss: float | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.layout, self.device = FlatLayout.of(model), device
        self.tokens_per_step = batch_sequences * train.sequence_length
        self._train, self._validation = train, validation
        self._batch_sequences, self._data_seed = batch_sequences, data_seed
        self._initial = torch.empty(self.layout.numel)
        self.layout.copy_to_flat(model, self._initial)
        model.to(device)  # type: ignore[arg-type]
        self._model, self._loss = model, LanguageLoss(model, router_loss=router_loss)
        named = dict(model.named_parameters())
        self._parameters = [named[name] for name in self.layout.names]
        self._recorded = RecordedPasses(self._passes, self.layout.numel) if device.type == "cuda" else None

    def initial(self) -> Tensor:
        return self._initial.clone()

    def batches(self, peer: int) -> Iterator[Tensor]:
        """See `Task.batches`; int64 [B, T + 1] each."""
        seed = 1_000_003 * self._data_seed + peer
        ordered = Batches([Resident(self._train)], self._batch_sequences, seed)
        return (batch for batch, _ in ordered)

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:
        on_device = Batch.of(batch, self._train.document_end).to(self.device)
        passes = self._passes if self._recorded is None else self._recorded
        return passes(parameters, on_device, out).item()

    def _passes(self, parameters: Tensor, batch: Batch, out: Tensor) -> Tensor:
        """Forward and backward: `out` becomes the mean gradient. -> the mean loss."""
        out.zero_()
        for parameter, value, gradient in zip(
            self._parameters, self.layout.views(parameters), self.layout.views(out), strict=True
        ):
            parameter.data = value
            parameter.grad = gradient
        return self._loss.backward(batch, batch.tokens)

    def validate(self, parameters: Tensor, *, final: bool) -> float:
        """See `Task.validate`; nats per token."""
        values = self.layout.views(parameters.to(self.device))
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
        count = len(self._validation) if final else INTERIM_SEQUENCES
        return evaluate(self._model, self._validation, count, 32)
