"""Loops that make the same training steps on copies of one model: ours, one written by hand, and transformers'."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as TransformersTrainer

from benchmarks.bare import plain_adamw
from peer.protocol.manifest import InnerSpec
from peer.system.clock import Clock
from peer.train.batch import Batch
from peer.train.compute import Compute, prepare
from peer.train.loop import train
from peer.train.optim import build_optimizer
from peer.train.precision import autocast
from peer.train.step import StepResult, Trainer

Run = Callable[[int], float]  # so many steps -> seconds


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contestant does.

    Attributes:
        rows_nt: windows, int64 [n, T + 1], read in order and then again.
        inner: optimizer, and sequences of a step.
        compute: micro-batch, precision, compilation, recomputation.
        timer: seconds.
    """

    rows_nt: Tensor
    inner: InnerSpec
    compute: Compute
    device: torch.device
    timer: Clock = time.perf_counter

    @property
    def tokens_per_step(self) -> int:
        return self.inner.batch_sequences * (self.rows_nt.shape[1] - 1)

    def batches(self) -> Iterator[Tensor]:
        """Of one step each, without end."""
        size, at = self.inner.batch_sequences, 0
        while True:
            yield self.rows_nt[[(at + offset) % len(self.rows_nt) for offset in range(size)]]
            at += size

    def clock(self) -> float:
        """When all that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.timer()


class _Alone:
    """No swarm, no hooks."""

    finished = stop_requested = False

    def after_step(self, result: StepResult, data_state: None = None) -> None:
        """Nothing to do."""


def ours(model: PreTrainedModel, work: Work) -> Run:
    """`peer.train.loop` without a swarm."""
    prepare(model, work.compute)
    optimizer = build_optimizer(model, work.inner)
    rate = work.inner.learning_rate
    trainer = Trainer(model, optimizer, work.inner, lambda: rate, compute=work.compute)
    batches = ((batch, None) for batch in work.batches())

    def run(steps: int) -> float:
        began = work.clock()
        train(trainer, islice(batches, steps), _Alone(), _Alone())
        return work.clock() - began

    return run


def by_hand(model: PreTrainedModel, work: Work) -> Run:
    """The loop that one writes by hand with the same features: micro-batches, autocast, clip, AdamW."""
    if work.compute.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    forward: Any = torch.compile(model) if work.compute.compiled else model
    optimizer = plain_adamw(model, work.inner, fused=work.device.type == "cuda")
    batches, context = work.batches(), autocast(work.device, work.compute.precision)
    scaler = torch.amp.GradScaler(work.device.type, enabled=work.compute.precision == "fp16")

    def step(batch: Batch) -> float:
        total = torch.zeros((), device=work.device)
        for micro in batch.micro_batches(work.compute.micro_batch or len(batch.inputs_bt)):
            part = micro.to(work.device)
            with context():
                logits = forward(input_ids=part.inputs_bt, use_cache=False).logits
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), part.labels_bt.flatten(), reduction="sum"
                ) / batch.tokens
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), work.inner.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    def run(steps: int) -> float:
        began = work.clock()
        for batch in islice(batches, steps):
            step(Batch.of(batch))
        return work.clock() - began

    return run


class _Clocked(TrainerCallback):
    """When each step ended."""

    def __init__(self, work: Work) -> None:
        self._work, self.ends = work, list[float]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(self._work.clock())


def transformers_trainer(model: PreTrainedModel, work: Work) -> Run:
    """`transformers.Trainer`; a step is measured from the end of the one before: set-up does not count."""
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    windows = [Batch.of(row.unsqueeze(0)) for row in work.rows_nt]
    rows = [{"input_ids": w.inputs_bt[0], "labels": w.labels_bt[0], "shift_labels": w.labels_bt[0]} for w in windows]
    micro = work.compute.micro_batch or work.inner.batch_sequences
    fused = "_fused" if work.device.type == "cuda" else ""
    if work.compute.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]

    def run(steps: int) -> float:
        clocked = _Clocked(work)
        with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder:
            arguments = TrainingArguments(
                output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=micro,
                gradient_accumulation_steps=work.inner.batch_sequences // micro, learning_rate=work.inner.learning_rate,
                max_grad_norm=work.inner.max_grad_norm, weight_decay=work.inner.weight_decay,
                lr_scheduler_type="constant", optim=f"adamw_torch{fused}",
                bf16=work.compute.precision == "bf16", fp16=work.compute.precision == "fp16",
                torch_compile=work.compute.compiled, use_cpu=work.device.type == "cpu", logging_strategy="no",
                save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
            )  # fmt: skip
            trainer = TransformersTrainer(model=model, args=arguments, train_dataset=rows, callbacks=[clocked])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return clocked.ends[-1] - clocked.ends[0]

    return run


SYSTEMS: dict[str, Callable[[PreTrainedModel, Work], Run]] = {
    "by hand": by_hand, "ours alone": ours, "transformers": transformers_trainer,
}  # fmt: skip
