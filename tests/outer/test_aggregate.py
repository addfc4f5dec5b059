"""Aggregators against float64, in chunks against whole, and under attack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from peer.errors import UserError
from peer.outer.aggregate import CHUNK, Aggregator, DirectionAverage, Mean, fold, norm, weighted_mean
from peer.outer.registry import AGGREGATORS, parameters
from peer.outer.robust import CentredClipping, ClippedMean, CoordinateMedian, Gated, TrimmedMean

ALL: list[Aggregator] = [
    Mean(),
    Mean(normalise="contributors"),
    Mean(normalise="members", members=9),
    ClippedMean(factor=1.0),
    TrimmedMean(fraction=0.25),
    CoordinateMedian(),
    CentredClipping(),
    Gated(),
    DirectionAverage(),
]
each_aggregator = pytest.mark.parametrize("aggregator", ALL, ids=lambda aggregator: type(aggregator).__name__)


def gaussian(seed: int, count: int, numel: int, cosine: float = 0.3) -> list[Tensor]:
    """Vectors of norm about sqrt(numel) whose pairwise cosine is about `cosine`."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator) * math.sqrt(cosine)
    return [common + torch.randn(numel, generator=generator) * math.sqrt(1.0 - cosine) for _ in range(count)]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


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


@each_aggregator
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_inputs_stay_and_the_result_is_new_finite_fp32(aggregator: Aggregator, count: int) -> None:
    vectors = gaussian(count, count, 1000)
    copies = [vector.clone() for vector in vectors]
    result = aggregator.aggregate(vectors, [1.0 + k for k in range(count)])
    assert result.dtype == torch.float32
    assert result.shape == (1000,)
    assert result.isfinite().all()
    assert all(result.data_ptr() != vector.data_ptr() for vector in vectors)
    assert all(torch.equal(a, b) for a, b in zip(vectors, copies, strict=True))


@each_aggregator
def test_nothing_to_aggregate_is_refused_as_by_the_mean(aggregator: Aggregator) -> None:
    with pytest.raises(ValueError, match="0 contributions"):
        aggregator.aggregate([], [])
    with pytest.raises(ValueError, match="contribution 1 has shape"):
        aggregator.aggregate([torch.ones(2), torch.ones(1)], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"weights\[0\]=nan"):
        aggregator.aggregate([torch.ones(2)], [math.nan])


@each_aggregator
def test_equal_contributions_give_that_vector(aggregator: Aggregator) -> None:
    (vector,) = gaussian(0, 1, 1000)
    result = aggregator.aggregate([vector.clone() for _ in range(9)], [float(k) for k in range(1, 10)])
    torch.testing.assert_close(result, vector, rtol=1e-6, atol=0.0)


@each_aggregator
def test_one_contribution_gives_that_vector(aggregator: Aggregator) -> None:
    (vector,) = gaussian(0, 1, 1000)
    scale = 1 / 9 if aggregator == Mean(normalise="members", members=9) else 1.0
    torch.testing.assert_close(aggregator.aggregate([vector], [3.0]), vector * scale, rtol=1e-6, atol=0.0)


@each_aggregator
def test_no_empty_part_is_a_problem(aggregator: Aggregator) -> None:
    assert aggregator.aggregate([torch.empty(0)] * 4, [1.0] * 4).shape == (0,)


@each_aggregator
def test_threads_change_no_bit_of_any_aggregator(aggregator: Aggregator) -> None:
    vectors = gaussian(1, 7, 3 * CHUNK + 17)
    one = aggregator.aggregate(vectors, [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0])
    torch.set_num_threads(3)
    assert torch.equal(aggregator.aggregate(vectors, [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0]), one)


@pytest.mark.parametrize(
    "aggregator", [a for a in ALL if a.separable], ids=lambda aggregator: type(aggregator).__name__
)
def test_separable_means_chunked_equals_whole_bit_for_bit(aggregator: Aggregator) -> None:
    numel = CHUNK + 3001
    vectors, weights = gaussian(2, 8, numel), [1.0, 5.0, 2.0, 2.0, 1.0, 7.0, 1.0, 3.0]
    pieces = [
        aggregator.aggregate([vector[a:b] for vector in vectors], weights)
        for a, b in itertools.pairwise([0, 1, 7, 4096, CHUNK - 1, numel])
    ]
    assert torch.equal(torch.cat(pieces), aggregator.aggregate(vectors, weights))


def test_which_are_separable() -> None:
    separable = {name for name, aggregator in AGGREGATORS.items() if aggregator().separable}
    assert separable == {"mean", "trimmed", "median"}
    assert list(AGGREGATORS) == ["mean", "clipped", "trimmed", "median", "centred-clipping", "gated", "direction"]
    assert {type(aggregator) for aggregator in ALL} == set(AGGREGATORS.values())
    assert parameters(Mean) == {"normalise": "weights"}
    assert parameters(DirectionAverage) == {}
    assert "inner" not in parameters(Gated)
    assert Gated().inner == CentredClipping()


def test_mean_normalises_as_it_says() -> None:
    vectors = [torch.tensor([1.0, 8.0]), torch.tensor([5.0, -2.0])]
    assert Mean().aggregate(vectors, [3, 1]).tolist() == weighted_mean(vectors, [3, 1]).tolist() == [2.0, 5.5]
    assert Mean(normalise="contributors").aggregate(vectors, [3, 1]).tolist() == [3.0, 3.0]
    assert Mean(normalise="members").bind(members=4).aggregate(vectors, [3, 1]).tolist() == [1.5, 1.5]


def test_mean_by_members_needs_them() -> None:
    for members in (None, 1):
        with pytest.raises(ValueError, match=f"2 contributions from {members} members"):
            Mean(normalise="members", members=members).aggregate([torch.ones(1)] * 2, [1.0, 1.0])


def clipped_64(x: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(x, axis=1)
    clips = np.minimum(1.0, 1.5 * np.median(norms) / norms)
    return np.asarray((w[:, None] * clips[:, None] * x).sum(axis=0) / w.sum())


def trimmed_64(x: NDArray[np.float64], _w: NDArray[np.float64]) -> NDArray[np.float64]:
    cut = int(0.3 * len(x))
    return np.asarray(np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0))


def median_64(x: NDArray[np.float64], _w: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.median(x, axis=0))


def centred_64(x: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    v = np.median(x, axis=0)
    tau = np.median(np.linalg.norm(x - v, axis=1))
    for _ in range(20):
        distances = np.linalg.norm(x - v, axis=1)
        clips = np.minimum(1.0, tau / np.maximum(distances, 1e-300))
        step = ((w * clips)[:, None] * (x - v)).sum(axis=0) / w.sum()
        v = v + step
        if np.linalg.norm(step) < 1e-4 * tau:
            break
    return np.asarray(v)


def direction_64(x: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(x, axis=1)
    u = (w[:, None] * x / norms[:, None]).sum(axis=0)
    return np.asarray((w * norms).sum() / w.sum() * u / np.linalg.norm(u))


REFERENCES = [
    (ClippedMean(factor=1.5), clipped_64),
    (TrimmedMean(fraction=0.3), trimmed_64),
    (CoordinateMedian(), median_64),
    (CentredClipping(), centred_64),
    (DirectionAverage(), direction_64),
]


@pytest.mark.parametrize(("aggregator", "reference"), REFERENCES, ids=lambda part: getattr(part, "__name__", ""))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), numel=st.integers(1, 200))
def test_agrees_with_float64(
    aggregator: Aggregator,
    reference: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
    seed: int,
    count: int,
    numel: int,
) -> None:
    generator = np.random.default_rng(seed)
    x = (generator.standard_normal((count, numel)) * generator.lognormal(0.0, 1.5, (count, 1))).astype(np.float32)
    weights = generator.integers(1, 100, count).astype(np.float64)
    result = aggregator.aggregate([torch.from_numpy(row) for row in x], weights.tolist())
    expected = reference(x.astype(np.float64), weights)
    # 1e-4: whether centred clipping takes one more step may hang on the last bit.
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=1e-4, atol=3e-4 * np.abs(x).max())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_norm_is_the_square_root_of_the_exact_sum(values: list[float]) -> None:
    exact = math.sqrt(math.fsum(value * value for value in values))
    assert norm(torch.tensor(values)) == pytest.approx(exact, rel=1e-15, abs=0.0)


def test_fold_adds_halves_of_any_length() -> None:
    for length in (1, 2, 3, 5, 8, 1000, 1023):
        assert fold(torch.arange(float(length), dtype=torch.float64)).item() == length * (length - 1) / 2


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
    whole = DirectionAverage().bind(shapes)
    assert whole.sizes == (10, 1, 1, 18)
    expected = [
        DirectionAverage().aggregate([vector[a:b] for vector in vectors], weights)
        for a, b in itertools.pairwise([0, 10, 11, 12, 30])
    ]
    assert torch.equal(whole.aggregate(vectors, weights), torch.cat(expected))
    assert DirectionAverage().bind(shapes, 4, 11).sizes == (6, 1)
    assert DirectionAverage().bind(shapes, 12).sizes == (18,)
    with pytest.raises(ValueError, match="contributions of 30 elements, the tensors have 7"):
        DirectionAverage().bind(shapes, 4, 11).aggregate(vectors, weights)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mean(normalise="nobody"), "normalise='nobody': must be"),  # type: ignore[arg-type]
        (lambda: ClippedMean(factor=0.5), "factor=0.5: must be finite and at least 1"),
        (lambda: ClippedMean(factor=math.nan), "factor=nan"),
        (lambda: TrimmedMean(fraction=0.5), r"fraction=0.5: must be in \[0, 0.5\)"),
        (lambda: TrimmedMean(fraction=-0.1), "fraction=-0.1"),
        (lambda: CentredClipping(iterations=0), "iterations=0: must be at least 1"),
        (lambda: CentredClipping(tolerance=1.0), r"tolerance=1.0: must be in \[0, 1\)"),
        (lambda: Gated(max_norm_ratio=math.inf), "max_norm_ratio=inf: must be finite and at least 1"),
        (lambda: Gated(min_cosine=1.0), r"min_cosine=1.0: must be in \[-1, 1\)"),
        (lambda: Gated(max_duplicate_cosine=0.0), r"max_duplicate_cosine=0.0: must be in \(0, 1\]"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Aggregator], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
