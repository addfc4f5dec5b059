"""One inner step: gradients of all its micro-batches, clip, optimizer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peer.errors import UserError
from peer.protocol.manifest import InnerSpec
from peer.system.clock import Clock
from peer.train.batch import Batch
from peer.train.compute import DEFAULT, Compute, is_compiled, is_out_of_memory, out_of_memory, uncompile
from peer.train.compute_limit import ComputeLimit
from peer.train.hook import StepHook
from peer.train.loss import LanguageLoss
from peer.train.model_config import reason_of
from peer.train.optim import Optimizer, reset_state, state_is_finite
from peer.train.precision import LossScale, autocast
from peer.train.ranks import whole
from peer.train.spikes import SpikeWatch

log = logging.getLogger(__name__)


class Problem(IntEnum):
    """Why a gradient could not be computed."""

    NONE, COMPILER, MEMORY = range(3)


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
        model: on its device, in training mode.
        inner: supplies the gradient norm to clip at, and the weight of a router's loss.
        compute: how this peer computes; it changes no mathematics.
        hook: what the recipe adds.
        clock: seconds, monotonic.

    Attributes:
        precision: of matrix products.
        micro_batch: sequences of one forward pass; None: the whole step.
        skipped_steps: how many were not finite.

    Raises:
        UserError: a precision that the device does not have.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: Optimizer, inner: InnerSpec, lr_at: Callable[[], float], *,
        compute: Compute = DEFAULT, hook: StepHook | None = None, clock: Clock = time.perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.hook = hook or StepHook()
        self.precision, self.micro_batch = compute.precision, compute.micro_batch
        self.skipped_steps = self._skipped_in_row = 0
        self.spikes = SpikeWatch()
        self._max_grad_norm = inner.max_grad_norm
        self._device, self._lr_at, self._clock = model.device, lr_at, clock
        self._loss = LanguageLoss(model, autocast(self._device, compute.precision), inner.router_loss)
        self._scale = LossScale() if compute.precision == "fp16" else None
        self._computed = self._rows = 0  # tokens of all ranks and sequences of this one, of the present step
        self._halve_on_out_of_memory = compute.auto_micro_batch
        self._ranks, self._trained = compute.ranks, [p for p in model.parameters() if p.requires_grad]

    def step(self, batch: Batch | Tensor) -> StepResult:
        """Learn from one batch; a step whose loss or gradient is not finite is skipped, counted and reported.

        Args:
            batch: a batch, or int64 [B, T + 1]: the first T tokens of a row are inputs, the last T labels.
        """
        started, rate = self._clock(), self._lr_at()
        loss, norm, learned = self._gradients(Batch.of(batch))
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if skipped:
            self._skip(loss, norm)
        else:
            self._skipped_in_row = 0
            self.spikes.see(loss)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.hook.on_clipped()
            self._descend()
            self.hook.after_step(rate)
        self.optimizer.zero_grad(set_to_none=True)
        self.hook.end(learned, rate)
        tokens = 0 if skipped else self._computed
        seconds = self._clock() - started
        return StepResult(
            loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate, seconds=seconds, skipped=skipped
        )

    def _descend(self) -> None:
        """Its first time makes the moments, which may not fit beside what a device keeps for gradients."""
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            what = f"out of memory on {self._device}: the optimizer's moments do not fit beside the model"
            hint = "use --adam-8bit, a smaller --per-device-train-batch-size, or a larger machine"
            raise UserError(what, hint) from None

    def _gradients(self, batch: Batch) -> tuple[float, float, Batch]:
        """-> (loss, norm of the gradient before it was clipped, what of the batch was computed in time); an overflow of
        fp16 is tried again, scaled less.
        """
        while True:
            loss = self._unscaled(batch, self.hook.limit)
            learned = self._in_time(batch)
            self.hook.on_gradient(partial(self._unscaled, learned))
            norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm))
            # One transfer for both numbers: each would stall the device on its own.
            loss_value, norm_value = torch.stack([loss, norm]).tolist()
            if self._scale is None or math.isfinite(norm_value):
                break
            if not (math.isfinite(loss_value) and self._scale.shrink()):
                return loss_value, norm_value, learned
            self.hook.forget()
            self.optimizer.zero_grad(set_to_none=True)
        if self._scale is not None:
            self._scale.grow()
        return loss_value, norm_value, learned

    def _in_time(self, batch: Batch) -> Batch:
        """What of it was computed before the time limit, with the tokens that its mean is over."""
        limit = self.hook.limit
        if limit is None:
            return batch
        return batch.first(self._rows).counting(batch.tokens if limit.fixed else self._computed)

    def _unscaled(self, batch: Batch, limit: ComputeLimit | None = None) -> Tensor:
        """As `_recovering`, without the factor of fp16."""
        loss = self._recovering(batch, limit)
        if self._scale is not None:
            self._scale.unscale_([p.grad for p in self.model.parameters() if p.grad is not None])
        return loss

    def _recovering(self, batch: Batch, limit: ComputeLimit | None) -> Tensor:
        """The loss, and its gradient; what a device cannot do is tried again by all in a smaller or a plainer way."""
        while True:
            loss, problem, reason = None, Problem.NONE, ""
            try:
                loss = self._accumulate(batch, limit)
            except Exception as error:
                if self._ranks.sharded and is_out_of_memory(error):  # the other ranks wait for this one's part
                    raise out_of_memory(self._device, self.micro_batch or len(batch.inputs_bt)) from None
                if self._ranks.sharded or not (is_out_of_memory(error) or is_compiled(self.model)):
                    raise
                problem = Problem.MEMORY if is_out_of_memory(error) else Problem.COMPILER
                reason = reason_of(error)
            worst = self._ranks.agree(problem, self._trained)
            if worst == Problem.NONE:
                assert loss is not None
                return self._of_all_ranks(batch, loss, limit)
            self.optimizer.zero_grad(set_to_none=True)
            if worst == Problem.COMPILER:
                uncompile(self.model, reason or "on another device")
            elif not self._halve(batch):
                raise out_of_memory(self._device, self.micro_batch or len(batch.inputs_bt))

    def _of_all_ranks(self, batch: Batch, loss: Tensor, limit: ComputeLimit | None) -> Tensor:
        """The gradients of all ranks added up; the mean over what was computed in time, unless the recipe fixes it."""
        loss = self._ranks.add_up(self._trained, loss)
        if limit is None:
            return loss
        (self._computed,) = self._ranks.totals([self._computed])
        share = batch.tokens / max(1, self._computed)
        for parameter in self._trained:
            if parameter.grad is not None and not limit.fixed:
                parameter.grad.mul_(share)
        return loss * share

    def _accumulate(self, batch: Batch, limit: ComputeLimit | None) -> Tensor:
        micro_batches = batch.micro_batches(self.micro_batch or len(batch.inputs_bt))
        scale = (1.0 if self._scale is None else self._scale.value) * self._ranks.mean_of
        if limit is not None:
            return self._accumulate_in_time(batch, micro_batches, limit, scale)
        losses = [self._loss.backward(micro.to(self._device), batch.tokens, scale) for micro in micro_batches]
        if self.hook.limit is None:
            self._computed = batch.tokens
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _accumulate_in_time(self, batch: Batch, micros: list[Batch], limit: ComputeLimit, scale: float) -> Tensor:
        """Of the micro-batches that end in time, of the first one at least."""
        losses, self._computed, self._rows = [], 0, 0
        limit.begin()
        for micro in micros:
            losses.append(self._loss.backward(micro.to(self._device), batch.tokens, scale))
            self._computed += micro.tokens
            self._rows += len(micro.inputs_bt)
            late = not limit.allows_another()
            if self._ranks.sharded:  # all make the same micro-batches: each gathers from all
                late = any(self._ranks.largest([late]))
            if late:
                break
        limit.end()
        return torch.stack(losses).sum()

    def _halve(self, batch: Batch) -> bool:
        """Whether fewer sequences at a time may help."""
        sequences = min(self.micro_batch or len(batch.inputs_bt), len(batch.inputs_bt))
        if not self._halve_on_out_of_memory or sequences == 1:
            return False
        self.micro_batch = sequences // 2
        log.warning("out of memory with %d sequences at a time: continuing with %d", sequences, self.micro_batch)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def _skip(self, loss: float, norm: float) -> None:
        """Count it; of many in a row the 1st, the 10th, the 100th is reported."""
        self.hook.forget()
        self.skipped_steps += 1
        self._skipped_in_row += 1
        if math.log10(self._skipped_in_row).is_integer():
            log.warning("step skipped: loss %s, gradient norm %s (skipped so far: %d)", loss, norm, self.skipped_steps)
        if any(self._ranks.largest([not state_is_finite(self.optimizer)])):
            reset_state(self.optimizer)
            log.warning("the state of the inner optimizer is not finite: it begins again")
