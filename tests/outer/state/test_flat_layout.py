"""Flat layouts, partitions, and the fragments of a model's blocks."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peer.errors import UserError
from peer.outer.math.ranges import Ranges
from peer.outer.state.flat_layout import Cut, FlatLayout, count_blocks, fragment_of_each, partition, strided_fragments


class Tied(nn.Module):
    """Tied embedding and head, a bf16 vector, one that does not train, an integer parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.brief = nn.Parameter(torch.arange(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.head = nn.Linear(3, 5, bias=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(7))


def test_layout_lists_every_parameter_that_trains_once() -> None:
    layout = FlatLayout.of(Tied())
    assert layout.names == ("brief", "embedding.weight", "head.bias")
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
    assert model.brief.tolist() == [1.0, 1.0 + 2.0**-6, 1.0, -3.0]


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


LLAMA = ["model.embed.weight", *(f"model.layers.{i}.{part}.weight" for i in range(7) for part in ("attn", "mlp"))]
LLAMA += ["model.norm.weight", "lm_head.weight"]
SHAPES = [(10, 2), *[(2, 3), (5,)] * 7, (2,), (2, 10)]


def test_blocks_are_dealt_in_turn_and_the_rest_goes_to_the_ends() -> None:
    # Embedding [0, 20), blocks of 11 elements from 20 on, norm and head [97, 119).
    assert strided_fragments(LLAMA, SHAPES, num_fragments=3) == (
        ((0, 31), (53, 64), (86, 97)),
        ((31, 42), (64, 75)),
        ((42, 53), (75, 86), (97, 119)),
    )
    assert strided_fragments(LLAMA, SHAPES, blocks_per_fragment=3) == strided_fragments(LLAMA, SHAPES, num_fragments=3)
    assert strided_fragments(LLAMA, SHAPES, num_fragments=1) == (((0, 119),),)


def test_blocks_are_dealt_by_rank_not_by_number() -> None:
    names, shapes = ["h.2.a", "h.4.a", "h.10.a"], [(1,), (1,), (1,)]
    assert strided_fragments(names, shapes, num_fragments=2) == (((0, 1), (2, 3)), ((1, 2),))


def test_models_without_blocks_are_one_fragment() -> None:
    assert strided_fragments(["weight", "bias"], [(2, 2), ()], num_fragments=1) == (((0, 5),),)
    assert strided_fragments(["weight", "bias"], [(2, 2), (0,)], blocks_per_fragment=3) == (((0, 4),),)
    with pytest.raises(UserError, match=r"num_fragments=2: must be in \[1, 1\]"):
        strided_fragments(["weight"], [(2,)], num_fragments=2)


def elements(fragments: tuple[Ranges, ...]) -> list[int]:
    return [element for ranges in fragments for start, stop in ranges for element in range(start, stop)]


@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from(["embed", "h.0.a", "h.1.a", "h.1.experts.0", "h.4.a", "h.10.a", "h.11.b", "norm"]),
            st.lists(st.integers(0, 3), max_size=2),
        ),
        max_size=12,
    ),
    data=st.data(),
)
def test_every_element_is_in_one_fragment(tensors: list[tuple[str, list[int]]], data: st.DataObject) -> None:
    names, shapes = [name for name, _ in tensors], [shape for _, shape in tensors]
    blocks = {name.split(".")[1] for name in names if "." in name}
    count = data.draw(st.integers(1, max(1, len(blocks))))
    fragments = strided_fragments(names, shapes, num_fragments=count)
    assert len(fragments) == count
    assert sorted(elements(fragments)) == list(range(sum(math.prod(shape) for shape in shapes)))
    for ranges in fragments:
        assert all(start < stop for start, stop in ranges)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_numbers_of_fragments_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="give exactly one"):
        strided_fragments([], [], num_fragments=1, blocks_per_fragment=1)
    with pytest.raises(UserError, match="blocks_per_fragment=0: must be at least 1"):
        strided_fragments(["h.0"], [(1,)], blocks_per_fragment=0)


def test_blocks_are_cut_in_stripes_or_in_rows_and_what_is_in_none_goes_with_them_or_apart() -> None:
    names = ["embed", *(f"layers.{index}.w" for index in range(6)), "norm", "head"]
    assert count_blocks(names) == 6
    assert fragment_of_each(names, Cut(3)) == [0, 0, 1, 2, 0, 1, 2, 2, 2]
    assert fragment_of_each(names, Cut(3, "consecutive")) == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert fragment_of_each(names, Cut(3, "consecutive", "apart")) == [2, 0, 0, 0, 1, 1, 1, 2, 2]
    assert fragment_of_each(names, Cut(3, "strided", "apart")) == [2, 0, 1, 0, 1, 0, 1, 2, 2]
    assert fragment_of_each(names, Cut(1, "consecutive", "apart")) == [0] * 9
    with pytest.raises(UserError, match="num_fragments=7"):
        fragment_of_each(names, Cut(8, "consecutive", "apart"))
