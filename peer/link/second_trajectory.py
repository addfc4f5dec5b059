"""FedGLOMO's second trajectory: the same batches, from the anchor of the round before (arXiv 2012.04061)."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from peer.outer.state.carry import carry_progress_
from peer.outer.state.outer_state import CHUNK, chunks


class LocalParameters(Protocol):
    """Parameters as one flat fp32 vector on the CPU, of which a call moves a range that begins at `start`."""

    def read(self, out: Tensor, start: int = 0) -> None: ...
    def write(self, flat: Tensor, start: int = 0) -> None: ...


class SecondTrajectory:
    """Parameters that are trained beside the local ones, and whose delta is subtracted from what is sent.

    Args:
        replica: the second parameters.
        kept: the share of their delta that is subtracted.
        numel: P.
    """

    def __init__(self, replica: LocalParameters, kept: float, numel: int) -> None:
        self._replica, self._kept = replica, kept
        self._anchor, self._sent, self.local_sent = (torch.empty(numel) for _ in range(3))

    NAMES: Final = ("anchor", "parameters")  # of `tensors`

    def begin(self, anchor: Tensor) -> None:
        """Start from this anchor (fp32 [P])."""
        self._anchor.copy_(anchor)
        self._replica.write(anchor)

    def subtract(self, local: Tensor) -> None:
        """Make of the local parameters (fp32 [P], in place) what is sent, and remember both."""
        self.local_sent.copy_(local)
        self._replica.read(self._sent)
        for start, stop in chunks(local.numel(), CHUNK):
            local[start:stop].add_((self._anchor[start:stop] - self._sent[start:stop]).mul_(self._kept))

    def follow(self, anchor: Tensor, scratch: Tensor, contributed: bool) -> None:
        """The local parameters leave this anchor (fp32 [P]) for the next: start from it, progress since on top.

        Args:
            scratch: fp32 [P], overwritten.
            contributed: what was sent is in the next anchor.
        """
        self._replica.read(scratch)
        carry_progress_(scratch, self._sent if contributed else self._anchor, anchor)
        self._replica.write(scratch)
        self._anchor.copy_(anchor)

    def go_back(self, outstanding: bool) -> None:
        """To what was sent, if that is on its way, else to the anchor."""
        self._replica.write(self._sent if outstanding else self._anchor)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must remember."""
        parameters = torch.empty_like(self._anchor)
        self._replica.read(parameters)
        return {"anchor": self._anchor, "parameters": parameters}

    def resume(self, anchor: Tensor, parameters: Tensor) -> None:
        """Continue from `tensors()` of an earlier process."""
        self._anchor.copy_(anchor)
        self._replica.write(parameters)
