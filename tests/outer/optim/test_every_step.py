"""The optimizers that all peers share: against torch's, in parts against whole, and in any order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peer.outer.math.step import Decoded, clip_factor, step_
from peer.outer.optim import every_step
from peer.outer.optim.averaged import Averaged
from peer.outer.optim.every_step import EveryStep, MuonSteps, orthogonal
from peer.outer.optim.optimizers import Vectors
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.train.muon import orthogonalise
from peer.train.optim import build_optimizer

STEPS = 30


class Blocks(nn.Module):
    """A vector, three matrices of blocks, two of one shape and a high one, and a matrix outside."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.norm = nn.Parameter(torch.randn(7, generator=generator))
        shapes = (6, 10), (12, 5), (6, 10)
        self.blocks = nn.ParameterList(torch.randn(*shape, generator=generator) for shape in shapes)
        self.head = nn.Parameter(torch.randn(9, 4, generator=generator))


def inner_of(kind: str) -> InnerSpec:
    return InnerSpec.model_validate({"optimizer": kind, "weight_decay": 0.2, "max_grad_norm": 2.0})


def gradient_of(step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + step))


def vectors_of(layout: FlatLayout, model: nn.Module, optimizer: EveryStep) -> Vectors:
    anchor = torch.empty(layout.numel)
    layout.copy_to_flat(model, anchor)
    return Vectors(anchor, [torch.full_like(anchor, value) for value in optimizer.initial_values])


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_a_shared_optimizer_is_the_trainers_own(kind: str) -> None:
    model, inner = Blocks(), inner_of(kind)
    layout, theirs = FlatLayout.of(model), build_optimizer(model, inner)
    assert len(layout.hidden) == 3
    ours = every_step.every_step(inner, inner.max_grad_norm).shaped(layout.shapes, layout.hidden)
    vectors = vectors_of(layout, model, ours)
    assert ours.max_norm == 2.0
    for step in range(STEPS):
        gradient, rate = gradient_of(step, layout.numel), 0.03 / (step + 1)
        for parameter, own in zip(model.parameters(), layout.views(gradient), strict=True):
            parameter.grad = own.clone()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), inner.max_grad_norm))
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        factor = clip_factor(Decoded(gradient), 2.0)
        assert factor == pytest.approx(2.0 / norm, rel=1e-5)
        ours.step(vectors, gradient * factor, vectors, round=step, lr_scale=rate)
        own = torch.empty(layout.numel)
        layout.copy_to_flat(model, own)
        torch.testing.assert_close(vectors.anchor, own, rtol=0.0, atol=2e-5 if kind == "muon" else 2e-6)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_elements_are_stepped_alone_as_with_all_others(kind: str) -> None:
    model, inner = Blocks(), inner_of(kind)
    layout = FlatLayout.of(model)
    ours = every_step.every_step(inner, None).shaped(layout.shapes, layout.hidden)
    assert ours.elementwise
    whole, tiled = (vectors_of(layout, model, ours) for _ in range(2))
    apart = Vectors(torch.empty(layout.numel), [torch.empty(layout.numel) for _ in tiled.buffers])
    for step in range(3):
        gradient = gradient_of(step, layout.numel)
        ours.step(whole, gradient, apart, round=step, lr_scale=0.1)  # into other memory
        whole, apart = apart, whole
        for start in range(0, layout.numel, 11):  # bounds within parameters
            own = slice(start, min(start + 11, layout.numel))
            part = Vectors(tiled.anchor[own], [buffer[own] for buffer in tiled.buffers])
            ours.step(part, gradient[own], part, round=step, lr_scale=0.1, start=start)
    for mine, theirs in zip((whole.anchor, *whole.buffers), (tiled.anchor, *tiled.buffers), strict=True):
        assert torch.equal(mine, theirs)


def test_muon_is_stepped_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inner = Blocks(), inner_of("muon")
    layout = FlatLayout.of(model)
    ours = every_step.every_step(inner, None).shaped(layout.shapes, layout.hidden)
    monkeypatch.setattr("peer.outer.math.step.tile_ranges", lambda *_: pytest.fail("cut"))
    vectors, gradient = vectors_of(layout, model, ours), gradient_of(0, layout.numel)
    expected = Vectors(vectors.anchor.clone(), [buffer.clone() for buffer in vectors.buffers])
    ours.step(expected, gradient, expected, lr_scale=0.1)
    step_(ours, vectors, ((0, layout.numel),), Decoded(gradient), lr_scale=0.1)
    assert torch.equal(vectors.anchor, expected.anchor)
    assert not torch.equal(vectors.buffers[0], torch.zeros(layout.numel))


@pytest.mark.parametrize("shape", [(40, 64), (64, 40), (50, 50)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_orthogonal_matrix_does_not_depend_on_the_order_of_sums(
    shape: tuple[int, int], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3)) * scale
    turned = orthogonal(matrices)
    torch.testing.assert_close(turned, orthogonalise(matrices), rtol=0.0, atol=1e-4)

    def other_order(left: Tensor, right: Tensor) -> Tensor:
        left, right = (left * 2.0**24).round(), (right * 2.0**24).round()
        total = torch.zeros(left.shape[0], left.shape[1], right.shape[2], dtype=torch.float64)
        for inner in reversed(range(left.shape[2])):
            total += left[:, :, inner, None] * right[:, None, inner]
        return total / 2.0**48

    monkeypatch.setattr(every_step, "_product", other_order)
    assert torch.equal(turned, orthogonal(matrices))
    assert torch.equal(turned[1:2], orthogonal(matrices[1:2]))


def test_the_device_of_large_products_reaches_an_optimizer_that_is_wrapped() -> None:
    base = every_step.every_step(inner_of("muon"), None)
    device = torch.device("meta")
    moved = Averaged(base=base, decay=0.9).computing_on(device)
    assert isinstance(moved, Averaged)
    assert isinstance(moved.base, MuonSteps)
    assert moved.base.device == device


def test_matrices_that_are_turned_one_by_one_step_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inner = Blocks(), inner_of("muon")
    layout = FlatLayout.of(model)
    ours = every_step.every_step(inner, None).shaped(layout.shapes, layout.hidden)
    together, gradient = vectors_of(layout, model, ours), gradient_of(0, layout.numel)
    alone = Vectors(together.anchor.clone(), [buffer.clone() for buffer in together.buffers])
    ours.step(together, gradient, together, lr_scale=0.1)
    monkeypatch.setattr(every_step, "BATCH_ELEMENTS", 1)
    ours.step(alone, gradient, alone, lr_scale=0.1)
    assert torch.equal(together.anchor, alone.anchor)
    assert not torch.equal(together.buffers[0], torch.zeros(layout.numel))
