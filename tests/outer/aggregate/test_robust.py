"""The robust aggregators, and under attack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.outer.aggregate.base import Mean, weighted_mean
from peer.outer.aggregate.robust import CentredClipping, ClippedMean, CoordinateMedian, TrimmedMean
from tests.outer.attacked import ATTACKS, attacked
from tests.outer.contributions import cosine, gaussian


def test_the_sign_of_zero_is_settled() -> None:
    zeros = [torch.tensor([-0.0]), torch.tensor([0.0]), torch.tensor([-0.0])]
    for aggregator in (CoordinateMedian(), TrimmedMean(fraction=0.4)):
        for order in itertools.permutations(zeros):
            assert aggregator.aggregate(list(order), [1.0] * 3).view(torch.int32).item() == 0


@given(st.permutations(range(9)))
def test_ranks_do_not_depend_on_the_order(order: Sequence[int]) -> None:
    vectors = gaussian(4, 9, 50)
    shuffled = [vectors[k] for k in order]
    for aggregator in (CoordinateMedian(), TrimmedMean(fraction=0.25)):
        expected = aggregator.aggregate(vectors, [1.0] * 9)
        assert torch.equal(aggregator.aggregate(shuffled, [1.0] * 9), expected)


def test_clipped_mean_without_anything_to_clip_is_the_mean_bit_for_bit() -> None:
    vectors, weights = gaussian(5, 6, 1000), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert torch.equal(ClippedMean(factor=3.0).aggregate(vectors, weights), weighted_mean(vectors, weights))


def test_clipped_mean_bounds_one_sender() -> None:
    vectors = [torch.tensor([1.0, 0.0])] * 3 + [torch.tensor([0.0, 1e6])]
    assert ClippedMean(factor=2.0).aggregate(vectors, [1.0] * 4).tolist() == pytest.approx([0.75, 0.5])
    sparse = [torch.zeros(2)] * 3 + [torch.tensor([0.0, 4.0])]  # a part that only one peer has trained
    assert ClippedMean(factor=2.0).aggregate(sparse, [1.0] * 4).tolist() == [0.0, 1.0]


def test_trimmed_with_nothing_trimmed_is_the_plain_mean() -> None:
    vectors = gaussian(6, 5, 1000)
    expected = weighted_mean(vectors, [1.0] * 5)
    torch.testing.assert_close(TrimmedMean(fraction=0.0).aggregate(vectors, [1.0] * 5), expected, rtol=0, atol=1e-6)


def test_centred_clipping_of_two_is_their_weighted_mean() -> None:
    vectors = gaussian(8, 2, 1000)
    result = CentredClipping().aggregate(vectors, [3.0, 1.0])
    assert cosine(result, weighted_mean(vectors, [3.0, 1.0])) > 0.98
    equal = CentredClipping().aggregate(vectors, [1.0, 1.0])
    torch.testing.assert_close(equal, weighted_mean(vectors, [1.0, 1.0]), rtol=0.0, atol=1e-6)


def test_centred_clipping_is_at_its_fixed_point() -> None:
    """The clipped pulls, weighted, add up to zero: what the cheap audit checks."""
    vectors, weights = gaussian(9, 12, 2000), [float(k) for k in range(1, 13)]
    vectors[3] = vectors[3] * 50.0
    v = CentredClipping(tolerance=1e-6).aggregate(vectors, weights).double()
    v0 = torch.stack(vectors).double().quantile(0.5, dim=0)
    tau = float(torch.stack([(x - v0).norm() for x in vectors]).quantile(0.5))
    pulls = [w * (x - v) * min(1.0, tau / float((x - v).norm())) for x, w in zip(vectors, weights, strict=True)]
    assert float(torch.stack(pulls).sum(dim=0).norm()) < 1e-4 * tau * sum(weights)


def test_centred_clipping_where_a_majority_agrees_is_that_vector() -> None:
    vectors = [torch.tensor([1.0, 2.0])] * 3 + [torch.tensor([50.0, -9.0]), torch.tensor([0.0, 0.0])]
    assert CentredClipping().aggregate(vectors, [1.0] * 5).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_centred_clipping_withstands_4_bad_of_16(attack: str, seed: int) -> None:
    contributions, _, honest_mean = attacked(attack, seed)
    assert cosine(CentredClipping().aggregate(contributions, [1.0] * 16), honest_mean) >= 0.89


@pytest.mark.parametrize("attack", ["flip x1000", "inner product x1000", "random x1000", "largest values"])
def test_the_mean_does_not(attack: str) -> None:
    contributions, _, honest_mean = attacked(attack, 0)
    assert cosine(Mean().aggregate(contributions, [1.0] * 16), honest_mean) < 0.1
