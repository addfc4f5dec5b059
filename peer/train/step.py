"""One inner step: forward, backward, clip, optimizer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peer.protocol.manifest import InnerSpec
from peer.system.clock import Clock
from peer.train.device import autocast
from peer.train.optim import Optimizer, reset_broken_state

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: mean nats per token, before the step.
        tokens: tokens learned from; 0 when the step was skipped.
        grad_norm: before clipping.
        learning_rate: that the step used.
        seconds: wall time.
        skipped: loss or gradient was not finite, so the weights did not move.
    """

    loss: float
    tokens: int
    grad_norm: float
    learning_rate: float
    seconds: float
    skipped: bool


class Trainer:
    """Makes inner steps on one model.

    Args:
        model: already on `device`, in training mode.
        inner: supplies the gradient norm to clip at.
        bf16: bfloat16 matrix products (CUDA only).
        clock: seconds, monotonic.

    Raises:
        UserError: bf16 on a device other than CUDA.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: Optimizer, inner: InnerSpec, device: torch.device,
        lr_at: Callable[[], float], *, bf16: bool = False, clock: Clock = time.perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.skipped_steps = 0
        self._skipped_in_row = 0
        self._max_grad_norm = inner.max_grad_norm
        self._device = device
        self._lr_at = lr_at
        self._autocast = autocast(device, bf16)
        self._clock = clock

    def step(self, batch_bt: Tensor) -> StepResult:
        """Learn from one batch; a step whose loss or gradient is not finite is skipped, counted and reported.

        Args:
            batch_bt: int64 [B, T + 1]; the first T tokens of a row are inputs, the last T labels.
        """
        started = self._clock()
        rate = self._lr_at()
        batch_bt = batch_bt.to(self._device, non_blocking=True)
        with self._autocast:
            loss = language_loss(self.model, batch_bt)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        # One transfer for both numbers: each would stall the device on its own.
        loss_value, norm_value = torch.stack([loss.detach(), norm]).tolist()
        skipped = not (math.isfinite(loss_value) and math.isfinite(norm_value))
        if skipped:
            self._skip(loss_value, norm_value)
        else:
            self._skipped_in_row = 0
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = 0 if skipped else batch_bt.shape[0] * (batch_bt.shape[1] - 1)
        return StepResult(loss=loss_value, tokens=tokens, grad_norm=norm_value, learning_rate=rate,
                          seconds=self._clock() - started, skipped=skipped)

    def _skip(self, loss: float, norm: float) -> None:
        """Count it; of many in a row the 1st, the 10th, the 100th is reported."""
        self.skipped_steps += 1
        self._skipped_in_row += 1
        if math.log10(self._skipped_in_row).is_integer():
            log.warning("step skipped: loss %s, gradient norm %s (skipped so far: %d)", loss, norm, self.skipped_steps)
        if reset_broken_state(self.optimizer):
            log.warning("the state of the inner optimizer is not finite: it begins again")


def language_loss(model: nn.Module, batch_bt: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats, computed in fp32.

    Args:
        model: a causal language model of transformers.
        batch_bt: int64 [B, T + 1].
    """
    logits_btv = model(input_ids=batch_bt[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_btv.flatten(0, 1).float(), batch_bt[:, 1:].flatten())
