from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F

from peer.errors import UserError
from peer.protocol.manifest import InnerSpec
from peer.train.batch import IGNORED, Batch
from peer.train.compute import Compute
from peer.train.optim import build_optimizer
from peer.train.step import Trainer
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(max_grad_norm=1e9, optimizer="sgd")
CPU = torch.device("cpu")


def masked(rows: int = 8, tokens: int = 13) -> Batch:
    """Labels of which many count for nothing, and of the rows each another number; one row has none."""
    batch = Batch.of(random_batches(1, rows, tokens + 1)[0])
    labels = batch.labels_bt.clone()
    for row in range(rows):
        labels[row, row * tokens // (rows - 1) :] = IGNORED
    return Batch(batch.inputs_bt, labels)


def gradients(batch: Batch, micro_batch: int | None) -> tuple[float, int, torch.Tensor]:
    """-> (loss, tokens, the gradient as what one step of plain descent changes)."""
    model = tiny_model()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 1.0,
                      compute=Compute(micro_batch=micro_batch))
    result = trainer.step(batch)
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return result.loss, result.tokens, before - after


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("batch", [Batch.of(random_batches(1, 8)[0]), masked()], ids=["all labels", "masked"])
def test_whatever_the_cut_a_step_is_that_of_the_whole_batch(batch, micro_batch):
    loss, tokens, gradient = gradients(batch, None)
    cut_loss, cut_tokens, cut_gradient = gradients(batch, micro_batch)
    assert cut_loss == pytest.approx(loss, abs=1e-6)
    assert cut_tokens == tokens == int((batch.labels_bt != IGNORED).sum())
    assert float((cut_gradient - gradient).norm()) <= 1e-6 * float(gradient.norm())


def test_the_loss_is_the_mean_over_the_labels_that_count():
    model, batch = tiny_model(), masked()
    logits = model(input_ids=batch.inputs_bt).logits
    chosen = batch.labels_bt != IGNORED
    expected = F.cross_entropy(logits[chosen], batch.labels_bt[chosen]).item()
    assert gradients(batch, 3)[0] == pytest.approx(expected, abs=1e-6)


def test_a_step_without_any_label_changes_nothing():
    batch = masked()
    empty = Batch(batch.inputs_bt, torch.full_like(batch.labels_bt, IGNORED))
    loss, tokens, gradient = gradients(empty, 3)
    assert (loss, tokens, float(gradient.norm())) == (0.0, 0, 0.0)


class Small:
    """A machine that holds two sequences at a time."""

    def __init__(self, trainer: Trainer, error: Exception) -> None:
        self.sizes: list[int] = []
        forward = trainer.model.forward

        def bounded(input_ids, **kwargs):
            self.sizes.append(len(input_ids))
            if len(input_ids) > 2:
                raise error
            return forward(input_ids=input_ids, **kwargs)

        trainer.model.forward = bounded


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
])
def test_out_of_memory_halves_the_micro_batch_and_the_step_is_made(error, caplog):
    model, batch = tiny_model(), random_batches(1, 8)[0]
    compute = Compute(micro_batch=8, auto_micro_batch=True)
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 0.1, compute=compute)
    small = Small(trainer, error)
    with caplog.at_level(logging.WARNING):
        result = trainer.step(batch)
    assert small.sizes == [8, 4, 2, 2, 2, 2]
    assert trainer.micro_batch == 2
    assert result.loss == pytest.approx(math.log(264), abs=0.05)
    assert len(caplog.messages) == 2
    assert "out of memory with 4 sequences at a time: continuing with 2" in caplog.messages[1]


@pytest.mark.parametrize(("compute", "hint"), [
    (Compute(micro_batch=4), "--auto-find-batch-size"), (Compute(micro_batch=1), "--gradient-checkpointing"),
])
def test_without_leave_to_halve_out_of_memory_is_told_with_the_remedy(compute, hint):
    model = tiny_model()
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 0.1, compute=compute)
    trainer.model.forward = lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(UserError, match=f"out of memory on cpu: a step of {compute.micro_batch} sequences") as told:
        trainer.step(random_batches(1, 8)[0])
    assert hint in told.value.hint


def test_moments_that_do_not_fit_are_told_with_the_remedy(monkeypatch):
    model = tiny_model()
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 0.1)
    monkeypatch.setattr(trainer.optimizer, "step", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    with pytest.raises(UserError, match="out of memory on cpu: the optimizer's moments do not fit") as told:
        trainer.step(random_batches(1, 8)[0])
    assert "--adam-8bit" in told.value.hint
    monkeypatch.setattr(trainer.optimizer, "step", lambda: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.step(random_batches(1, 8)[0])


def test_an_error_that_is_not_about_memory_is_raised():
    model = tiny_model()
    compute = Compute(auto_micro_batch=True)
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 0.1, compute=compute)
    trainer.model.forward = lambda **_: (_ for _ in ()).throw(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.step(random_batches(1, 8)[0])
