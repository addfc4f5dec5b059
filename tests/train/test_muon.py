"""Muon against its definition, and against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peer.outer.optim.every_step import UPDATE_RMS, is_hidden_matrix
from peer.protocol.manifest import InnerSpec
from peer.train.muon import MuonAdamW, MuonMatrices, orthogonalise
from peer.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from tests.train.tiny import tiny_model


def matrices(count: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 8, 32), (3, 32, 8), (2, 64, 48), (1, 1, 5), (1, 5, 1)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_singular_values_come_near_to_1(shape: tuple[int, int, int], scale: float) -> None:
    given = matrices(*shape) * scale
    before = given.clone()
    result = orthogonalise(given)
    assert result.shape == shape
    assert torch.equal(given, before)
    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_the_directions_are_those_of_the_nearest_orthogonal_matrix() -> None:
    given = matrices(4, 24, 40)
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    result = orthogonalise(given)
    # Newton-Schulz changes singular values alone: between the singular vectors of the input, the result is diagonal.
    between = u.mT @ result @ v.mT
    torch.testing.assert_close(between, torch.diag_embed(between.diagonal(dim1=1, dim2=2)), rtol=0.0, atol=1e-4)
    cosine = (result * (u @ v)).sum(dim=(1, 2)) / result.norm(dim=(1, 2)) / (u @ v).norm(dim=(1, 2))
    assert float(cosine.min()) > 0.98


def test_transposing_and_zeros() -> None:
    given = matrices(2, 12, 30)
    torch.testing.assert_close(orthogonalise(given.mT).mT, orthogonalise(given), rtol=0.0, atol=1e-5)
    assert not orthogonalise(torch.zeros(1, 4, 4)).any()


def test_a_step_by_hand() -> None:
    weights, gradients = matrices(3, 6, 10), [matrices(3, 6, 10, seed) for seed in (1, 2)]
    expected, momentum = weights.clone(), torch.zeros_like(weights)
    muon = MuonMatrices(list(weights.unbind()), momentum=0.9, weight_decay=0.1)
    for gradient in gradients:
        muon.step(gradient.unbind(), lr=0.02)
        momentum = 0.9 * momentum + gradient
        step = orthogonalise(gradient + 0.9 * momentum)
        expected = expected * (1.0 - 0.02 * 0.1) - 0.02 * UPDATE_RMS * 10**0.5 * step
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    # The scale gives a step the size of one of AdamW: .2 per element, whatever the shape.
    assert float((step * 10**0.5).square().mean().sqrt()) == pytest.approx(1.0, abs=0.2)


def test_torchs_muon_takes_the_same_steps() -> None:
    """Up to its arithmetic, which is bf16: 2% of the way. Its momentum is averaged, which orthogonalising undoes."""
    ours, theirs = nn.Parameter(matrices(1, 16, 24)[0]), nn.Parameter(matrices(1, 16, 24)[0])
    start = ours.detach().clone()
    mine = MuonMatrices([ours.detach()], momentum=0.95, weight_decay=0.1)
    other = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(10):
        gradient = matrices(1, 16, 24, seed + 1)[0]
        mine.step([gradient], lr=0.02)
        theirs.grad = gradient.clone()
        other.step()
    way, apart = (ours.detach() - start).norm(), (ours - theirs).detach().norm()
    assert float(apart) < 0.02 * float(way)


def test_hidden_matrices_are_those_within_blocks() -> None:
    hidden = {name for name, p in tiny_model().named_parameters() if is_hidden_matrix(name, p.shape)}
    assert "model.layers.0.self_attn.q_proj.weight" in hidden
    assert "model.layers.1.mlp.down_proj.weight" in hidden
    assert not any("norm" in name or "embed" in name or "head" in name for name in hidden)
    assert len(hidden) == 14


INNER = InnerSpec(optimizer="muon", learning_rate=0.01, muon_learning_rate_ratio=2.0, weight_decay=0.1)


def stepped(steps: int, load_at: int | None = None) -> tuple[nn.Module, MuonAdamW]:
    model = tiny_model()
    optimizer = build_optimizer(model, INNER)
    assert isinstance(optimizer, MuonAdamW)
    for step in range(steps):
        if step == load_at:
            saved = {key: tensor.clone() for key, tensor in optimizer_tensors(optimizer).items()}
            optimizer = build_optimizer(model, INNER)
            load_optimizer_tensors(optimizer, saved)
            assert isinstance(optimizer, MuonAdamW)
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def test_every_parameter_is_in_one_group_and_moves() -> None:
    model, optimizer = stepped(1)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for before, after in zip(tiny_model().parameters(), model.parameters(), strict=True):
        assert float((before - after).detach().abs().max()) > 1e-3


def test_saved_state_continues_bit_for_bit() -> None:
    straight, resumed = stepped(4)[0], stepped(4, load_at=2)[0]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_gradients_are_forgotten() -> None:
    model, optimizer = stepped(1)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
