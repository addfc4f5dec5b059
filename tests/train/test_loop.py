from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.outer.optim.inner_lr import learning_rate
from peer.protocol.manifest import InnerSpec
from peer.train.loop import train
from peer.train.optim import build_optimizer
from peer.train.step import StepResult, Trainer
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(learning_rate=5e-3, warmup_steps=5, weight_decay=0.1)
TOTAL = 30


class NoSync:
    """Training alone: never finished, no swarm to inform."""

    finished = False

    def after_step(self, result):
        """Nothing to do."""


class Recorder:
    """Hooks that keep everything and stop after a number of steps."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.results: list[StepResult] = []
        self.states: list[int] = []
        self._stop_after = stop_after

    @property
    def stop_requested(self) -> bool:
        return len(self.results) >= self._stop_after

    def after_step(self, result: StepResult, data_state: int) -> None:
        self.results.append(result)
        self.states.append(data_state)


class FinishAfter:
    """A sync whose run ends after a number of steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    @property
    def finished(self) -> bool:
        return self._left <= 0

    def after_step(self, result: StepResult) -> None:
        assert not result.skipped
        self._left -= 1


def numbered(count: int) -> list[tuple[Tensor, int]]:
    return list(zip(random_batches(count), range(1, count + 1), strict=True))


def make_trainer(recorder: Recorder) -> Trainer:
    model = tiny_model()
    return Trainer(
        model, build_optimizer(model, INNER), INNER,
        lambda: learning_rate(INNER, len(recorder.results), TOTAL, 1000),
    )


def plain_pytorch_losses(model: torch.nn.Module) -> list[float]:
    """The same training as anyone would write it; only the learning rates come from peer.train."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    losses = []
    for step, batch in enumerate(random_batches(TOTAL)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(INNER, step, TOTAL, 1000)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_alone_equals_a_plain_pytorch_loop_bit_for_bit():
    recorder = Recorder()
    trainer = make_trainer(recorder)
    train(trainer, numbered(TOTAL), NoSync(), recorder)
    reference = tiny_model()
    assert [result.loss for result in recorder.results] == plain_pytorch_losses(reference)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), reference.parameters(), strict=True))
    assert recorder.states == list(range(1, TOTAL + 1))


def test_a_finished_run_ends_the_loop_after_the_hooks_saw_the_step():
    recorder = Recorder()
    train(make_trainer(recorder), numbered(9), FinishAfter(4), recorder)
    assert recorder.states == [1, 2, 3, 4]


def test_a_requested_stop_ends_the_loop():
    recorder = Recorder(stop_after=3)
    train(make_trainer(recorder), numbered(9), NoSync(), recorder)
    assert recorder.states == [1, 2, 3]
