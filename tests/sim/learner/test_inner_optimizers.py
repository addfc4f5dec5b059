"""The simulator's optimizers on a flat vector against those of a real trainer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.sim.learner.inner_optimizers import InnerOptimizer, inner_optimizer
from peer.sim.learner.replica import clip_
from peer.train.optim import build_optimizer
from tests.train.tiny import tiny_model

STEPS = 20


def gradients(numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(numel, generator=generator) * 10.0 ** (step % 5 - 3) for step in range(STEPS)]


def flat(inner: InnerSpec, model: nn.Module) -> tuple[FlatLayout, Tensor, InnerOptimizer]:
    layout = FlatLayout.of(model)
    parameters = torch.empty(layout.numel)
    layout.copy_to_flat(model, parameters)
    return layout, parameters, inner_optimizer(str(inner.optimizer), layout, inner)(parameters)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_are_those_of_the_trainer(kind: str, weight_decay: float) -> None:
    inner = InnerSpec.model_validate(
        {"optimizer": kind, "weight_decay": weight_decay, "betas": (0.9, 0.95), "muon_learning_rate_ratio": 1.5}
    )
    model = tiny_model()
    trainer = build_optimizer(model, inner)
    layout, parameters, optimizer = flat(inner, model)
    for step, gradient in enumerate(gradients(layout.numel)):
        lr = 1e-3 * (1 + step % 3)
        for group in trainer.param_groups:
            group["lr"] = lr
        named = dict(model.named_parameters())
        for name, view in zip(layout.names, layout.views(gradient), strict=True):
            named[name].grad = view.clone()
        trainer.step()
        before = gradient.clone()
        optimizer.step(gradient, lr)
        assert torch.equal(gradient, before)
    expected = torch.empty(layout.numel)
    layout.copy_to_flat(model, expected)
    torch.testing.assert_close(parameters, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_a_copied_state_continues_bit_for_bit(kind: str) -> None:
    inner = InnerSpec.model_validate({"optimizer": kind})
    model = tiny_model()
    layout, one, optimizer = flat(inner, model)
    _, other, follower = flat(inner, model)
    given = gradients(layout.numel)
    for gradient in given[:5]:
        optimizer.step(gradient, 1e-3)
    other.copy_(one)
    follower.copy_from(optimizer)
    for gradient in given[5:10]:
        optimizer.step(gradient, 1e-3)
        follower.step(gradient, 1e-3)
    assert torch.equal(one, other)


@pytest.mark.parametrize("norm", [0.5, 1.0, 20.0])
def test_clipping_is_torchs(norm: float) -> None:
    gradient = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(torch.zeros(1001))
    parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_([parameter], norm)
    clip_(gradient, norm)
    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0.0)
