"""Batches in a seeded order that resumes exactly: every batch comes with the state to continue after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from peer.data.packing import PackedTokens
from peer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DataState:
    """Where a peer is in its data: `position` windows of the order (seed, epoch) are used up."""

    seed: int
    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        """A JSON document that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DataState:
        """The inverse of `to_dict`.

        Raises:
            UserError: missing or unknown keys, or a value that is no integer >= 0.
        """
        expected = ("seed", "epoch", "position")
        whole = all(type(document.get(key)) is int and document[key] >= 0 for key in expected)
        if set(document) != set(expected) or not whole:
            raise UserError(
                f"data state {dict(document)!r}: needs exactly seed, epoch and position, integers >= 0",
                "resume from another checkpoint",
            )
        return cls(**document)


class Batches:
    """An endless iterator of (batch int64 [B, T + 1], the state after it).

    Each epoch visits the windows in a new permutation drawn from (seed, epoch); windows that do not fill a last
    batch wait for the next epoch's order. There is no shuffle buffer, so a state is three integers and resuming
    from it continues bit for bit. Resuming needs the same data and the same batch size.

    Args:
        batch_sequences: B.
        seed: of the order, integer >= 0; a resumed state brings its own.
        state: where to continue; None starts at the beginning.

    Raises:
        UserError: fewer windows than one batch.
    """

    def __init__(
        self, packed: PackedTokens, batch_sequences: int, seed: int, state: DataState | None = None
    ) -> None:
        if batch_sequences < 1 or len(packed) < batch_sequences:
            raise UserError(
                f"batch size {batch_sequences}: must be between 1 and the {len(packed)} sequences of the data",
                "lower the batch size, or add text",
            )
        self._packed = packed
        self._batch_sequences = batch_sequences
        self.state = state if state is not None else DataState(seed=seed)
        self._order = self._permutation(self.state)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, DataState]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, DataState]:
        state = self.state
        if state.position + self._batch_sequences > len(self._order):
            state = DataState(seed=state.seed, epoch=state.epoch + 1)
            self._order = self._permutation(state)
        end = state.position + self._batch_sequences
        batch_bt = torch.stack([self._packed.window(int(index)) for index in self._order[state.position : end]])
        self.state = DataState(seed=state.seed, epoch=state.epoch, position=end)
        return batch_bt, self.state

    def _permutation(self, state: DataState) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng([state.seed, state.epoch]).permutation(len(self._packed))
