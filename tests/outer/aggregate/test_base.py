"""What holds for every aggregator: against float64, in chunks against whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peer.errors import UserError
from peer.outer.aggregate.base import Aggregator, DirectionAverage, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.penalised import Penalised
from peer.outer.aggregate.robust import CentredClipping, ClippedMean, CoordinateMedian, TrimmedMean
from peer.outer.numerics.ordered_sums import CHUNK
from peer.outer.recipe.registry import AGGREGATORS, parameters
from tests.outer.contributions import gaussian

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
    Penalised(max_norm=1e9),
]
each_aggregator = pytest.mark.parametrize("aggregator", ALL, ids=lambda aggregator: type(aggregator).__name__)


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
    names = ["mean", "clipped", "trimmed", "median", "centred-clipping", "gated", "direction", "penalised"]
    assert list(AGGREGATORS) == names
    assert {type(aggregator) for aggregator in ALL} == set(AGGREGATORS.values())
    assert parameters(Mean) == {"normalise": "weights"}
    assert parameters(DirectionAverage) == {}


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
        (lambda: Gated(min_share=1.0), r"min_share=1.0: must be in \[0, 1\)"),
        (lambda: Gated(radius=0.5), "radius=0.5: must be finite and at least 1"),
        (lambda: Gated(max_duplicate_cosine=0.0), r"max_duplicate_cosine=0.0: must be in \(0, 1\]"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Aggregator], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
