"""The gates and the clipping of open runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peer.outer.aggregate.base import weighted_mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.gram import inner_products, largest_magnitude
from tests.outer.attacked import ATTACKS, attacked
from tests.outer.contributions import cosine, gaussian

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


def products(vectors: list[Tensor]) -> Tensor:
    found = inner_products(vectors, [largest_magnitude(vector) for vector in vectors])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_inner_products_are_those_of_float64(scale: float) -> None:
    vectors = [vector * scale * (1 + k) for k, vector in enumerate(gaussian(0, 5, 200_001))]
    stacked = torch.stack(vectors).double()
    expected = stacked @ stacked.T
    lengths = expected.diagonal().sqrt()
    error = (products(vectors) - expected).abs() / torch.outer(lengths, lengths)
    assert float(error.max()) < 1e-4


def test_inner_products_do_not_depend_on_threads_or_order() -> None:
    vectors = gaussian(1, 4, 300_000)
    expected = products(vectors)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(products(vectors), expected)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products(vectors[::-1]), expected.flip(0, 1))


def test_a_vector_made_to_hide_from_the_rounding_does_not() -> None:
    """One large value, and half a rounding step everywhere else: its norm is still told to two percent."""
    numel = 1 << 19
    hiding = torch.full((numel,), 0.499 * 2.0**-15)
    hiding[7] = 1.0
    assert products([hiding])[0, 0].sqrt().item() == pytest.approx(float(hiding.double().norm()), rel=0.02)


@SEEDS
@pytest.mark.parametrize("attack", ATTACKS)
def test_it_withstands_4_bad_of_16(attack: str, seed: int) -> None:
    contributions, _, honest_mean = attacked(attack, seed)
    assert cosine(Gated().aggregate(contributions, [1.0] * 16), honest_mean) >= 0.89


@SEEDS
@pytest.mark.parametrize("attack", [a for a in ATTACKS if not a.startswith("a little")])
def test_the_gates_drop_the_bad_and_no_honest_peer(attack: str, seed: int) -> None:
    contributions, bad, honest_mean = attacked(attack, seed)
    kept, reasons = Gated().select(contributions, [1.0] * 16)
    assert list(reasons) == bad
    assert sorted([*kept, *reasons]) == list(range(16))
    assert cosine(Gated().aggregate(contributions, [1.0] * 16), honest_mean) > 0.995


@SEEDS
@pytest.mark.parametrize("numel", [100, 2000, 1 << 16])
@pytest.mark.parametrize("agreement", [0.0, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 16])
def test_honest_peers_of_any_agreement_are_averaged(count: int, agreement: float, numel: int, seed: int) -> None:
    vectors = gaussian(seed, count, numel, agreement)
    kept, reasons = Gated().select(vectors, [1.0] * count)
    mean = weighted_mean(vectors, [1.0] * count)
    if agreement >= 0.3 or numel >= 2000:
        assert not reasons
        assert cosine(Gated().aggregate(vectors, [1.0] * count), mean) > 0.98
    if numel >= 1 << 16:
        assert torch.equal(Gated().aggregate(vectors, [1.0] * count), mean)
    assert len(kept) >= count - 1


def test_unequal_honest_weights_stay_the_weighted_mean() -> None:
    vectors = gaussian(3, 4, 1 << 16)
    vectors = [vector * scale for vector, scale in zip(vectors, (0.4, 1.0, 1.1, 2.2), strict=True)]
    weights = [40.0, 100.0, 110.0, 300.0]
    kept, reasons = Gated().select(vectors, weights)
    assert (len(kept), reasons) == (4, {})
    assert cosine(Gated().aggregate(vectors, weights), weighted_mean(vectors, weights)) > 0.97


@SEEDS
@pytest.mark.parametrize("count", [4, 8])
def test_one_that_flips_its_sign_is_dropped_from_a_small_group(count: int, seed: int) -> None:
    vectors = gaussian(seed, count, 1 << 14)
    vectors[1] = -vectors[1]
    assert list(Gated().select(vectors, [1.0] * count)[1]) == [1]


@pytest.mark.parametrize("count", [3, 4, 7, 8])
def test_in_a_small_group_what_agrees_with_any_other_is_kept(count: int) -> None:
    """The odd one opposes all but its friend; among eight, one friend is not enough."""
    common, *own = gaussian(21, 9, 1 << 14, 0.0)
    vectors = [0.5 * common + vector for vector in own[:count]]
    vectors[1] = own[0] - 0.2 * common
    assert list(Gated().select(vectors, [1.0] * count)[1]) == ([1] if count == 8 else [])
    lonely = [*vectors[:1], own[1] - 0.5 * common, *vectors[2:]]
    kept, reasons = Gated().select(lonely, [1.0] * count)
    assert kept == (0, *range(2, count))
    assert reasons[1].startswith(f"{'median' if count == 8 else 'largest'} cosine -0.")


def test_of_two_nobody_is_dropped_but_what_is_not_finite() -> None:
    vectors = [torch.randn(4096), -1000.0 * torch.randn(4096)]
    assert Gated().select(vectors, [1.0, 3.0]) == ((0, 1), {})
    assert torch.equal(Gated().aggregate(vectors, [1.0, 3.0]), weighted_mean(vectors, [1.0, 3.0]))
    twins = [vectors[0], vectors[0]]
    assert Gated().select(twins, [1.0, 1.0]) == ((0, 1), {})
    kept, reasons = Gated().select([vectors[0], torch.full((4096,), math.nan)], [1.0, 1.0])
    assert (kept, reasons) == ((0,), {1: "holds NaN or infinity"})


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
    assert reasons[4].startswith("near-duplicate (cosine 1.0000")
    assert reasons[4].endswith(") of contribution 0")
    assert reasons[6].startswith("median cosine -0.")


def test_where_all_are_alike_nobody_is_a_copy() -> None:
    """Rows of an embedding that nobody's text has touched shrink by the same weight decay everywhere."""
    vectors = [torch.randn(4096)] * 5
    assert Gated().select(vectors, [1.0] * 5) == ((0, 1, 2, 3, 4), {})
    some = [vectors[0]] * 10 + gaussian(6, 6, 4096, 0.0)
    assert not any("near-duplicate" in reason for reason in Gated().select(some, [1.0] * 16)[1].values())


def test_what_only_weight_decay_has_moved_is_nobodys_copy() -> None:
    vectors = gaussian(4, 8, 4096)
    decay = 0.01 * torch.randn(4096, generator=torch.Generator().manual_seed(5))
    vectors[1] = vectors[4] = vectors[6] = decay + 0.001 * vectors[0]
    assert not Gated().select(vectors, [1.0] * 8)[1]


def test_who_stands_for_more_tokens_may_be_longer() -> None:
    vectors = gaussian(2, 4, 4096, 0.9)
    vectors[2] = vectors[2] * 8.0
    assert not Gated().select(vectors, [10.0, 10.0, 30.0, 10.0])[1]
    assert list(Gated().select(vectors, [10.0] * 4)[1]) == [2]


def test_a_crowd_of_little_weight_does_not_outvote_the_rest() -> None:
    honest, byzantine = gaussian(12, 4, 4096), [-vector for vector in gaussian(12, 12, 4096)[4:]]
    kept, reasons = Gated().select([*honest, *byzantine], [10.0] * 4 + [1.0] * 8)
    assert kept == (0, 1, 2, 3)
    assert set(reasons) == set(range(4, 12))


def test_who_claims_much_does_not_outvote_the_rest() -> None:
    vectors = gaussian(14, 16, 4096)
    bad = [2, 5, 9, 12]
    contributions = [-vector if i in bad else vector for i, vector in enumerate(vectors)]
    weights = [3.0 if i in bad else 1.0 for i in range(16)]
    assert list(Gated().select(contributions, weights)[1]) == bad


def test_byzantine_peers_do_not_vouch_for_each_other() -> None:
    honest = gaussian(15, 12, 1 << 14, 0.1)
    clique = [-torch.stack(honest).mean(0) + 0.2 * vector for vector in gaussian(16, 4, 1 << 14, 0.0)]
    kept, reasons = Gated().select([*honest, *clique], [1.0] * 16)
    assert (kept, list(reasons)) == (tuple(range(12)), [12, 13, 14, 15])


@SEEDS
def test_a_wide_spread_forgives_what_is_odd_and_not_what_opposes(seed: int) -> None:
    common, *own = gaussian(seed, 17, 1 << 14, 0.0)
    strengths = [-0.1, *(0.1 + 0.075 * place for place in range(11)), *[-0.5] * 4]
    vectors = [strength * common + vector for strength, vector in zip(strengths, own, strict=True)]
    assert list(Gated().select(vectors, [1.0] * 16)[1]) == [12, 13, 14, 15]


def test_where_most_disagree_nobody_is_dropped_for_it() -> None:
    vectors = [torch.eye(4096)[k] - sum(torch.eye(4096)[:4]) / 4 for k in range(4)]
    assert not Gated().select(vectors, [1.0] * 4)[1]


@pytest.mark.parametrize("count", [2, 3, 4, 16])
@pytest.mark.parametrize("idle", [1, 2])
def test_zeros_weigh_nothing(count: int, idle: int) -> None:
    vectors = gaussian(13, count + 1 - idle, 4096, 0.9)
    contributions = [*vectors[:1], *[torch.zeros(4096)] * idle, *vectors[1:]]
    weights = [float(100 + place) for place in range(len(contributions))]
    kept, reasons = Gated().select(contributions, weights)
    assert kept == (0, *range(1 + idle, len(contributions)))
    assert set(reasons.values()) == {"norm 0, where others have moved"}
    alone = Gated().aggregate(vectors, [weights[place] for place in kept])
    assert torch.equal(Gated().aggregate(contributions, weights), alone)


def test_where_all_are_zeros_the_mean_is_zero() -> None:
    zeros = [torch.zeros(4096)] * 4
    assert not Gated().select(zeros, [1.0] * 4)[1]
    assert not Gated().aggregate(zeros, [1.0] * 4).any()


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 0.04])
def test_what_is_far_shorter_than_the_rest_weighs_nothing(scale: float) -> None:
    vectors = gaussian(17, 4, 4096, 0.5)
    contributions = [*vectors[:3], vectors[3] * scale]
    kept, reasons = Gated().select(contributions, [10.0] * 4)
    assert kept == (0, 1, 2)
    assert reasons[3].startswith("norm ")
    assert " is below 0.05 x the median 6" in reasons[3]
    assert torch.equal(Gated().aggregate(contributions, [10.0] * 4), Gated().aggregate(vectors[:3], [10.0] * 3))
    assert not Gated().select([*vectors[:3], vectors[3] * 0.06], [10.0] * 4)[1]


def test_who_stands_for_few_tokens_may_be_shorter() -> None:
    vectors = gaussian(18, 4, 4096, 0.5)
    contributions = [*vectors[:3], vectors[3] * 0.01]
    assert not Gated().select(contributions, [100.0, 100.0, 100.0, 10.0])[1]
    assert list(Gated().select(contributions, [100.0, 100.0, 100.0, 30.0])[1]) == [3]


def test_when_all_are_dropped_the_round_is_told() -> None:
    with pytest.raises(ValueError, match="all 2 contributions were dropped; the first: holds NaN or infinity"):
        Gated().aggregate([torch.tensor([math.nan])] * 2, [1.0, 1.0])
