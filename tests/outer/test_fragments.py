"""Flat layouts and partitions."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peer.outer.fragments import FlatLayout, partition


class Tied(nn.Module):
    """Tied embedding and head, a frozen bf16 vector, an integer parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.frozen = nn.Parameter(torch.arange(4, dtype=torch.bfloat16), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.head = nn.Linear(3, 5, bias=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(7))


def test_layout_lists_every_floating_parameter_once() -> None:
    layout = FlatLayout.of(Tied())
    assert layout.names == ("frozen", "embedding.weight", "head.bias")
    assert layout.shapes == ((4,), (5, 3), (5,))
    assert layout.offsets == (0, 4, 19)
    assert layout.numel == 24


def test_parameters_survive_the_way_to_flat_and_back() -> None:
    model, other = Tied(), Tied()
    layout = FlatLayout.of(model)
    flat = torch.full((layout.numel,), torch.nan)
    layout.copy_to_flat(model, flat)
    assert torch.equal(flat[:4], torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert torch.equal(flat[4:19].view(5, 3), model.embedding.weight.detach())
    layout.copy_from_flat(flat, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert other.head.weight is other.embedding.weight
    assert all(parameter.grad_fn is None for parameter in other.parameters())


def test_bf16_parameters_round_to_nearest_even() -> None:
    model = Tied()
    layout = FlatLayout.of(model)
    flat = torch.zeros(layout.numel)
    flat[:4] = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-9, -3.0])
    layout.copy_from_flat(flat, model)
    assert model.frozen.tolist() == [1.0, 1.0 + 2.0**-6, 1.0, -3.0]


def test_digest_tells_layouts_apart() -> None:
    same = FlatLayout.of(Tied())
    assert same.digest() == FlatLayout.of(Tied()).digest()
    assert len({FlatLayout.of(nn.Linear(2, 3)).digest(), FlatLayout.of(nn.Linear(3, 2)).digest(), same.digest()}) == 3
    described = b'[["weight",[3,2]],["bias",[3]]]'
    assert FlatLayout.of(nn.Linear(2, 3)).digest() == hashlib.sha256(described).hexdigest()


@pytest.mark.parametrize("flat", [torch.zeros(7), torch.zeros(8, dtype=torch.float64), torch.zeros(2, 4)])
def test_a_flat_vector_of_another_kind_is_refused(flat: torch.Tensor) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(AssertionError, match="flat vector is"):
        FlatLayout.of(model).copy_to_flat(model, flat)


def test_another_model_is_refused() -> None:
    layout = FlatLayout.of(nn.Linear(4, 2))
    with pytest.raises(AssertionError, match="weight has shape"):
        layout.copy_to_flat(nn.Linear(2, 4), torch.zeros(layout.numel))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 100_000), st.integers(1, 70), st.integers(1, 5000))
def test_partition_covers_exactly_at_block_boundaries_and_evenly(numel: int, parts: int, block: int) -> None:
    bounds = partition(numel, parts, block)
    assert len(bounds) == parts
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert all(start <= stop and start % block == 0 for start, stop in bounds if start < numel)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= block


def test_partition_by_hand() -> None:
    assert partition(1000, 3, 256) == ((0, 256), (256, 512), (512, 1000))
    assert partition(100, 3, 256) == ((0, 0), (0, 0), (0, 100))
    assert partition(0, 2, 256) == ((0, 0), (0, 0))
