"""THE loop. It knows nothing of where batches come from or where the weights go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from torch import Tensor

from peer.train.batch import Batch
from peer.train.step import StepResult, Trainer

State = TypeVar("State")
State_contra = TypeVar("State_contra", contravariant=True)


class Sync(Protocol):
    """The whole interface between training and the other peers that train this model."""

    @property
    def finished(self) -> bool:
        """The run has reached its goal."""

    def after_step(self, result: StepResult) -> None:
        """May hand over a snapshot of the weights, may replace them by new ones."""


class Hooks(Protocol[State_contra]):
    """Everything optional: metrics, validation, checkpoints."""

    @property
    def stop_requested(self) -> bool:
        """Whether this peer was asked to stop."""

    def after_step(self, result: StepResult, data_state: State_contra) -> None:
        """`data_state` continues after the batch of this step."""


def train(trainer: Trainer, batches: Iterable[tuple[Batch | Tensor, State]], sync: Sync, hooks: Hooks[State]) -> None:
    """Train until the run's goal is reached, a stop is asked for, or the batches end."""
    for batch, data_state in batches:
        result = trainer.step(batch)
        sync.after_step(result)
        hooks.after_step(result, data_state)
        if sync.finished or hooks.stop_requested:
            break
