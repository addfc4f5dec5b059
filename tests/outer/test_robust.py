"""The robust aggregators, and under attack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.aggregate import Mean, weighted_mean
from peer.outer.robust import CentredClipping, ClippedMean, CoordinateMedian, Gated, TrimmedMean
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


def attacked(attack: str, seed: int, numel: int = 1 << 16) -> tuple[list[Tensor], list[int], Tensor]:
    """16 contributions, the indices of the 4 bad among them, and the mean of the 12 honest (cosine .3)."""
    honest = gaussian(seed, 12, numel)
    stacked = torch.stack(honest)
    mean, spread = stacked.mean(dim=0), stacked.std(dim=0)
    generator = torch.Generator().manual_seed(seed + 1)
    bad = {
        "flip x1000": [-1000.0 * vector for vector in honest[:4]],
        "flip": [-vector for vector in honest[:4]],
        "flip below the gate": [-2.9 * vector for vector in honest[:4]],
        "inner product": [-0.5 * mean] * 4,
        "inner product x1000": [-1000.0 * mean] * 4,
        "a little is enough": [mean - 1.5 * spread + 0.3 * torch.randn(numel, generator=generator) for _ in range(4)],
        "a little, in copies": [mean - 1.5 * spread] * 4,
        "random x1000": [1000.0 * torch.randn(numel, generator=generator) for _ in range(4)],
        "largest values": [torch.full((numel,), 3e38)] * 4,
    }[attack]
    indices = [1, 6, 7, 15]
    contributions = list(honest)
    for index, vector in zip(indices, bad, strict=True):
        contributions.insert(index, vector)
    return contributions, indices, mean


ATTACKS = [
    "flip x1000",
    "flip",
    "flip below the gate",
    "inner product",
    "inner product x1000",
    "a little is enough",
    "a little, in copies",
    "random x1000",
    "largest values",
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_centred_clipping_withstands_4_bad_of_16(attack: str, seed: int) -> None:
    contributions, _, honest_mean = attacked(attack, seed)
    assert cosine(CentredClipping().aggregate(contributions, [1.0] * 16), honest_mean) >= 0.89
    assert cosine(Gated().aggregate(contributions, [1.0] * 16), honest_mean) >= 0.89


@pytest.mark.parametrize("attack", ["flip x1000", "inner product x1000", "random x1000", "largest values"])
def test_the_mean_does_not(attack: str) -> None:
    contributions, _, honest_mean = attacked(attack, 0)
    assert cosine(Mean().aggregate(contributions, [1.0] * 16), honest_mean) < 0.1


@pytest.mark.parametrize("attack", [a for a in ATTACKS if not a.startswith("a little")])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gates_drop_the_bad_and_no_honest_peer(attack: str, seed: int) -> None:
    contributions, bad, honest_mean = attacked(attack, seed)
    kept, reasons = Gated().select(contributions, [1.0] * 16)
    assert list(reasons) == bad
    assert sorted([*kept, *reasons]) == list(range(16))
    assert cosine(Gated().aggregate(contributions, [1.0] * 16), honest_mean) > 0.995


def test_each_gate_says_why() -> None:
    vectors = gaussian(10, 10, 4096)
    vectors[1] = vectors[1].clone().index_fill_(0, torch.tensor([5]), math.nan)
    vectors[3] = vectors[3] * 3.5
    vectors[4] = vectors[0] * 1.01
    vectors[6] = -vectors[6]
    vectors[8] = torch.full((4096,), -math.inf)
    kept, reasons = Gated().select(vectors, [1.0] * 10)
    assert kept == (0, 2, 5, 7, 9)
    assert reasons[1] == reasons[8] == "holds NaN or infinity"
    assert reasons[3].startswith("norm 22")
    assert "is above 3 x the median 6" in reasons[3]
    assert reasons[4] == "near-duplicate of contribution 0 (cosine 1.000000)"
    assert reasons[6].startswith("cosine -0.")
    assert reasons[6].endswith("to the rest is below 0")


def test_gates_let_honest_peers_through_and_use_the_inner_aggregator() -> None:
    vectors, weights = gaussian(11, 16, 4096), [float(k) for k in range(1, 17)]
    kept, reasons = Gated().select(vectors, weights)
    assert kept == tuple(range(16))
    assert not reasons
    assert torch.equal(Gated(inner=Mean()).aggregate(vectors, weights), weighted_mean(vectors, weights))


def test_of_two_that_disagree_both_stay() -> None:
    vectors = [torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.1])]
    assert Gated().select(vectors, [1.0, 1.0]) == ((0, 1), {})


def test_a_light_majority_cannot_outvote_the_weight() -> None:
    honest, liars = gaussian(12, 4, 4096), [-vector for vector in gaussian(12, 6, 4096)[4:]]
    kept, reasons = Gated().select([*honest, *liars, -honest[0]], [10.0] * 4 + [1.0] * 3)
    assert kept == (0, 1, 2, 3)
    assert set(reasons) == {4, 5, 6}


def test_zeros_pass_the_gates_and_do_not_set_the_norm() -> None:
    vectors = [torch.zeros(64)] * 5 + gaussian(13, 3, 64)
    kept, _ = Gated().select(vectors, [1.0] * 8)
    assert kept == tuple(range(8))


def test_when_all_are_dropped_the_round_is_told() -> None:
    with pytest.raises(ValueError, match="all 2 contributions were dropped; the first: holds NaN or infinity"):
        Gated().aggregate([torch.tensor([math.nan])] * 2, [1.0, 1.0])
