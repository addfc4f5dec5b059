"""The aggregators that trust everybody: means of vectors and of directions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.outer.aggregate.base import DirectionAverage, Mean, weighted_mean
from peer.outer.numerics.ordered_sums import fold, norm
from tests.outer.contributions import gaussian


def test_mean_by_hand() -> None:
    mean = weighted_mean([torch.tensor([1.0, -2.0]), torch.tensor([5.0, 6.0])], [300, 100])
    assert mean.tolist() == [2.0, 0.0]
    assert mean.dtype == torch.float32


def test_mean_agrees_with_float64_and_leaves_its_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(5000, generator=generator) for _ in range(7)]
    copies = [vector.clone() for vector in vectors]
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    expected = sum(w * v.double() for w, v in zip(weights, vectors, strict=True)) / 25.0
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(weighted_mean(vectors, weights).double(), expected, rtol=0.0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(vectors, copies, strict=True))


@pytest.mark.parametrize("weight", [1e-300, 0.3, 7.0, 1e300])
def test_one_contribution_is_returned_bit_for_bit(weight: float) -> None:
    only = torch.tensor([1.1, -0.0, 3e38, 1e-45])
    mean = weighted_mean([only], [weight])
    assert torch.equal(mean.view(torch.int32), only.view(torch.int32))
    assert mean.data_ptr() != only.data_ptr()


def test_the_order_is_the_callers() -> None:
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    forth = weighted_mean([big, -big, one], [1, 1, 1])
    back = weighted_mean([one, big, -big], [1, 1, 1])
    assert forth.item() == pytest.approx(1 / 3)
    assert back.item() == 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_weights_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"weights\[1\]=.*must be finite and above 0"):
        weighted_mean([torch.ones(2), torch.ones(2)], [1.0, bad])


def test_contributions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="0 contributions"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match="1 contributions with 2 weights"):
        weighted_mean([torch.ones(2)], [1.0, 1.0])
    with pytest.raises(ValueError, match="contribution 1 has shape"):
        weighted_mean([torch.ones(2), torch.ones(1)], [1.0, 1.0])
    with pytest.raises(ValueError, match="add up to inf"):
        weighted_mean([torch.ones(1), torch.ones(1)], [1e308, 1e308])


def test_threads_do_not_change_the_bits() -> None:
    vectors = [torch.sin(torch.arange(200_003, dtype=torch.float32) * k) for k in (0.1, 0.2, 0.3)]
    one = weighted_mean(vectors, [1.0, 2.0, 4.0])
    torch.set_num_threads(2)
    assert torch.equal(weighted_mean(vectors, [1.0, 2.0, 4.0]), one)


def test_mean_normalises_as_it_says() -> None:
    vectors = [torch.tensor([1.0, 8.0]), torch.tensor([5.0, -2.0])]
    assert Mean().aggregate(vectors, [3, 1]).tolist() == weighted_mean(vectors, [3, 1]).tolist() == [2.0, 5.5]
    assert Mean(normalise="contributors").aggregate(vectors, [3, 1]).tolist() == [3.0, 3.0]
    assert Mean(normalise="members").bind(members=4).aggregate(vectors, [3, 1]).tolist() == [1.5, 1.5]


def test_mean_by_members_needs_them() -> None:
    for members in (None, 1):
        with pytest.raises(ValueError, match=f"2 contributions from {members} members"):
            Mean(normalise="members", members=members).aggregate([torch.ones(1)] * 2, [1.0, 1.0])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_norm_is_the_square_root_of_the_exact_sum(values: list[float]) -> None:
    exact = math.sqrt(math.fsum(value * value for value in values))
    assert norm(torch.tensor(values)) == pytest.approx(exact, rel=1e-15, abs=0.0)


def test_fold_adds_halves_of_any_length() -> None:
    for length in (1, 2, 3, 5, 8, 1000, 1023):
        assert fold(torch.arange(float(length), dtype=torch.float64)).item() == length * (length - 1) / 2


def test_orthonormal_vectors_average_to_norm_1() -> None:
    vectors = list(torch.eye(16))
    average = DirectionAverage().aggregate(vectors, [1.0] * 16)
    torch.testing.assert_close(average, torch.full((16,), 0.25), rtol=1e-6, atol=0.0)
    assert norm(weighted_mean(vectors, [1.0] * 16)) == pytest.approx(0.25)


def test_direction_average_by_hand() -> None:
    """Directions weigh by the weights alone, not by the norms; opposite ones cancel to zero; zero has no direction."""
    average = DirectionAverage().aggregate([torch.tensor([9.0, 0.0]), torch.tensor([0.0, 1.0])], [3.0, 1.0])
    expected = 7.0 / math.sqrt(10.0) * torch.tensor([3.0, 1.0])
    torch.testing.assert_close(average, expected, rtol=1e-6, atol=0.0)
    pair = [torch.tensor([2.0]), torch.tensor([-2.0])]
    assert DirectionAverage().aggregate(pair, [1.0, 1.0]).tolist() == [0.0]
    half = [torch.tensor([2.0, 0.0]), torch.zeros(2)]
    assert DirectionAverage().aggregate(half, [1.0, 1.0]).tolist() == [1.0, 0.0]


def test_direction_average_per_tensor_and_per_part() -> None:
    vectors, weights = gaussian(7, 4, 30), [1.0, 2.0, 3.0, 4.0]
    shapes = [(2, 5), (), (1,), (18,)]
    whole = DirectionAverage().shaped(shapes)
    assert whole.sizes == (10, 1, 1, 18)
    expected = [
        DirectionAverage().aggregate([vector[a:b] for vector in vectors], weights)
        for a, b in itertools.pairwise([0, 10, 11, 12, 30])
    ]
    assert torch.equal(whole.aggregate(vectors, weights), torch.cat(expected))
    with pytest.raises(ValueError, match="contributions of 30 elements, the tensors have 12"):
        DirectionAverage().shaped(shapes[:3]).aggregate(vectors, weights)
