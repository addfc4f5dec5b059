from __future__ import annotations

import math

import torch

from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.train.gradient import KeptGradient
from peer.train.optim import load_optimizer_tensors, optimizer_tensors
from peer.train.step import Trainer
from tests.train.plain import plain_loss
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(optimizer="sgd", learning_rate=0.25)


def kept_trainer(rate=0.25, max_grad_norm=1.0):
    model = tiny_model()
    layout = FlatLayout.of(model)
    kept = KeptGradient(model, layout)
    inner = INNER.model_copy(update={"max_grad_norm": max_grad_norm})
    return Trainer(model, kept, inner, lambda: rate), kept, layout


def flat_gradient(model, layout, batch, max_norm):
    plain_loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    flat = torch.zeros(layout.numel)
    named = dict(model.named_parameters())
    for name, view in zip(layout.names, layout.views(flat), strict=True):
        view.copy_(named[name].grad)
    return flat


def test_a_step_keeps_the_clipped_gradient_times_the_rate_and_moves_nothing():
    trainer, kept, layout = kept_trainer(max_grad_norm=0.5)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    (batch,) = random_batches(1)
    result = trainer.step(batch)
    out = torch.empty(layout.numel)
    kept.take(out)
    reference = flat_gradient(tiny_model(), layout, batch, 0.5)
    assert torch.equal(out, reference * 0.25)
    assert math.isclose(float(out.norm()), 0.25 * min(0.5, result.grad_norm), rel_tol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_skipped_step_hands_over_zeros_and_not_the_gradient_before():
    trainer, kept, layout = kept_trainer()
    trainer.step(random_batches(1)[0])
    out = torch.empty(layout.numel)
    kept.take(out)
    assert float(out.abs().sum()) > 0.0
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    assert trainer.step(random_batches(1)[0]).skipped
    kept.take(out)
    assert torch.equal(out, torch.zeros(layout.numel))


def test_what_has_no_gradient_is_zero():
    trainer, kept, layout = kept_trainer()
    trainer.step(random_batches(1)[0])
    unused = next(trainer.model.parameters())
    trainer.step(random_batches(2)[1])
    for parameter in trainer.model.parameters():
        parameter.grad = None if parameter is unused else torch.ones_like(parameter)
    kept.step()
    out = torch.empty(layout.numel)
    kept.take(out)
    assert float(out.count_nonzero()) == layout.numel - unused.numel()


def test_it_has_no_state_to_save():
    _, kept, _ = kept_trainer()
    assert optimizer_tensors(kept) == {}
    load_optimizer_tensors(kept, {})
