"""What a peer adds to the shared anchor before the round is over: its own share of the next step (arXiv 2502.12996)."""

from __future__ import annotations

import torch
from torch import Tensor

from peer.outer.optim.optimizers import OuterOptimizer
from peer.outer.state.outer_state import CHUNK, chunks


class OwnPart:
    """The share of one peer's contribution that its own parameters hold early.

    The paper's peers have anchors of their own, which step with D(t - H) + (D_i(t) - D_i(t - H)) / R. Where the outer
    step is linear in its history, such an anchor is the shared one, which steps with D alone, plus what the same
    optimizer makes of (D_i(t) - D_i(t - H)) / R. The second is what this object keeps: so a peer that joins, or misses
    rounds, needs no anchor but the shared one.

    Args:
        optimizer: of the anchor; linear in its history.
        numel: P.

    Attributes:
        offset: fp32 [P]; the parameters start from the shared anchor plus this.
    """

    def __init__(self, optimizer: OuterOptimizer, numel: int) -> None:
        self._optimizer, self._steps = optimizer, 0
        self.offset = torch.zeros(numel)
        self._share, self._sent = torch.zeros(numel), torch.zeros(numel)
        self._buffers = [torch.zeros(numel) for _ in range(optimizer.num_buffers)]

    def subtract(self, local: Tensor) -> None:
        """Make of local parameters (fp32 [P], in place) what is sent: without the offset, and with what no anchor holds
        of what was sent before.
        """
        for start, stop in chunks(local.numel(), CHUNK):
            local[start:stop].sub_(self.offset[start:stop]).sub_(self._sent[start:stop])

    def renew(self, anchor: Tensor, snapshot: Tensor, peers: int) -> None:
        """What is sent now takes the place of what was sent before.

        Args:
            anchor: the shared one, fp32 [P].
            snapshot: what `subtract` has made.
            peers: R, that share a round.
        """
        torch.sub(anchor, snapshot, out=self._sent)
        for start, stop in chunks(self.offset.numel(), CHUNK):
            share = self._sent[start:stop] / peers
            step = share - self._share[start:stop]
            buffers = [buffer[start:stop] for buffer in self._buffers]
            self._optimizer.step_(self.offset[start:stop], buffers, step, round=self._steps)
            self._share[start:stop] = share
        self._steps += 1

    def counted(self) -> None:
        """The shared anchor holds what was sent."""
        self._sent.zero_()

    def forget(self) -> None:
        """Begin as a newcomer does."""
        self._steps = 0
        for vector in self.tensors().values():
            vector.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must remember."""
        return dict(
            zip(self.names(self._optimizer), (self.offset, self._share, self._sent, *self._buffers), strict=True)
        )

    @staticmethod
    def names(optimizer: OuterOptimizer) -> tuple[str, ...]:
        """Of `tensors`."""
        return ("offset", "share", "sent", *(f"buffer{index}" for index in range(optimizer.num_buffers)))

    def resume(self, **tensors: Tensor) -> None:
        """Continue from `tensors()` of an earlier process."""
        for name, vector in self.tensors().items():
            vector.copy_(tensors[name])
