from __future__ import annotations

import logging
import math
from itertools import count

import pytest
import torch
import torch.nn.functional as F

from peer.protocol.manifest import InnerSpec
from peer.train.batch import Batch
from peer.train.loss import LanguageLoss
from peer.train.optim import build_optimizer, optimizer_tensors
from peer.train.step import Trainer
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(max_grad_norm=0.05)
CPU = torch.device("cpu")


def make_trainer(lr: float = 1e-2, **options: object) -> Trainer:
    model = tiny_model()
    return Trainer(model, build_optimizer(model, INNER), INNER, lambda: lr, **options)


def test_the_loss_is_next_token_cross_entropy():
    model, batch = tiny_model(), random_batches(1)[0]
    logits = model(input_ids=batch).logits
    rows = [F.cross_entropy(logits[row, t], batch[row, t + 1]) for row in range(2) for t in range(8)]
    assert LanguageLoss(model).mean(Batch.of(batch)) == pytest.approx(torch.stack(rows).mean().item(), abs=1e-6)


def test_what_a_step_reports():
    ticks = count(0.0, 2.5)
    result = make_trainer(lr=3e-3, clock=lambda: next(ticks)).step(random_batches(1)[0])
    assert result.loss == pytest.approx(math.log(264), abs=0.05)
    assert result.tokens == 16
    assert (result.learning_rate, result.seconds, result.skipped) == (3e-3, 2.5, False)
    assert result.grad_norm > 0.05


def test_it_learns_a_repeated_batch():
    trainer, batch = make_trainer(), random_batches(1)[0]
    losses = [trainer.step(batch).loss for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_gradients_are_clipped_before_the_optimizer_sees_them():
    trainer = make_trainer()
    seen: list[float] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(_norm(trainer)))
    trainer.step(random_batches(1)[0])
    assert seen == [pytest.approx(0.05, rel=1e-4)]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def _norm(trainer: Trainer) -> float:
    return math.sqrt(sum(float(p.grad.pow(2).sum()) for p in trainer.model.parameters()))


def _spoil_logits(_module, _inputs, output) -> None:
    output.logits = output.logits * math.inf


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_moves_nothing_and_is_counted(poison, caplog):
    trainer, batch = make_trainer(), random_batches(1)[0]
    trainer.step(batch)
    weight = trainer.model.get_output_embeddings().weight
    if poison == "loss":
        handle = trainer.model.register_forward_hook(_spoil_logits)
    else:
        handle = weight.register_hook(lambda grad: grad * math.nan)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    moments = [value.clone() for state in trainer.optimizer.state.values() for value in state.values()]
    with caplog.at_level(logging.WARNING):
        result = trainer.step(batch)
    assert result.skipped
    assert result.tokens == 0
    assert trainer.skipped_steps == 1
    assert "step skipped" in caplog.text
    assert math.isfinite(result.loss) is (poison == "gradient")
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    after = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    handle.remove()
    assert not trainer.step(batch).skipped
    assert trainer.skipped_steps == 1


def test_of_many_skipped_steps_a_few_are_reported(caplog):
    trainer, batch = make_trainer(), random_batches(1)[0]
    trainer.model.register_forward_hook(_spoil_logits)
    for _ in range(200):
        trainer.step(batch)
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["1)", "10)", "100)"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_state_that_is_not_finite_begins_again(caplog, optimizer):
    """Or it would spoil the parameters again, whatever they are restored to."""
    inner = InnerSpec(max_grad_norm=0.05, optimizer=optimizer)
    model, batch = tiny_model(), random_batches(1)[0]
    trainer = Trainer(model, build_optimizer(model, inner), inner, lambda: 1e-2)
    trainer.step(batch)
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    for tensor in optimizer_tensors(trainer.optimizer).values():
        tensor.fill_(math.inf)
    trainer.step(batch)
    assert trainer.step(batch).skipped, "the parameters are spoilt now"
    assert "the state of the inner optimizer is not finite" in caplog.text
    for parameter, value in zip(model.parameters(), whole, strict=True):
        parameter.data.copy_(value)
    assert not trainer.step(batch).skipped
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
