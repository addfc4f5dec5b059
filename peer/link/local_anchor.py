"""The local parameters of this process, and the anchor that they were trained from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from peer.link.memory import SharedState
from peer.outer.aggregate.gram import largest_magnitude
from peer.outer.optim.optimizers import OuterOptimizer
from peer.outer.state.carry import carry_progress_
from peer.outer.state.outer_state import LARGEST_VALUE


class LocalParameters(Protocol):
    """The local parameters, as one flat fp32 vector on the CPU."""

    def read(self, out: Tensor) -> None: ...
    def write(self, flat: Tensor) -> None: ...


class LocalAnchor:
    """This process's copy of the anchor, and what becomes of the parameters when there is a new one.

    Args:
        optimizer: says what the run yields: the anchor, or an average of anchors.

    Attributes:
        round: of the copy.
        base: the copy, fp32 [P]; it stays as it is until the next merge.
        scratch: fp32 [P], for any use between two merges.
    """

    def __init__(self, memory: SharedState, replica: LocalParameters, optimizer: OuterOptimizer) -> None:
        self.memory, self.replica, self._optimizer = memory, replica, optimizer
        self.round = 0
        self.base = torch.empty_like(memory.anchor)
        self.scratch = torch.empty_like(memory.anchor)
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """What the run yields at `round`, fp32 [P]: to evaluate and to export. Usually the anchor."""
        return self.base if self._result is None else self._result

    def take(self, round: int) -> None:
        """local <- anchor."""
        self.replica.write(self.memory.anchor)
        self.keep(round)

    def carry(self, round: int, contributed: bool) -> None:
        """local <- anchor + (local - base): keeps every step that the new anchor does not hold yet.

        Args:
            round: of the new anchor.
            contributed: the snapshot went into it; the base is the snapshot then.
        """
        self.replica.read(self.scratch)
        carry_progress_(self.scratch, self.memory.snapshot if contributed else self.base, self.memory.anchor)
        self.replica.write(self.scratch)
        self.keep(round)

    @property
    def usable(self) -> bool:
        """Whether the local parameters are finite, and a contribution that can be averaged and applied."""
        self.replica.read(self.scratch)
        return self.fits(self.scratch)

    def fits(self, local: Tensor) -> bool:
        """As `usable`, for fp32 [P]."""
        torch.sub(local, self.base, out=self.scratch)
        return largest_magnitude(self.scratch) <= LARGEST_VALUE  # NaN compares as false

    def drop(self, outstanding: bool) -> None:
        """local <- the snapshot that is on its way, if one is, else the anchor."""
        self.replica.write(self.memory.snapshot if outstanding else self.base)

    def keep(self, round: int) -> None:
        """Copy what the agent may change again as soon as it hears that this process has merged."""
        self.round = round
        self.base.copy_(self.memory.anchor)
        result = self._optimizer.result(self.memory.anchor, self.memory.buffers, round)
        self._result = None if result is self.memory.anchor else result
