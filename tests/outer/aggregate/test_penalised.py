"""EDiT's penalty: weights that fade with the norm, what is left out, and the clip."""

from __future__ import annotations

import math

import pytest
import torch

from peer.outer.aggregate.base import weighted_mean
from peer.outer.aggregate.penalised import Penalised, fading

X, Y = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 6.0])  # norms 5 and 6


@pytest.mark.parametrize("x", [0.0, 1e-9, 0.5, 1.0, 7.3, 41.0, 699.0])
def test_fading_is_the_exponential(x: float) -> None:
    assert fading(x) == pytest.approx(math.exp(-x), rel=1e-11)


def test_what_is_far_off_fades_to_nothing() -> None:
    assert fading(1e9) == 0.0


def test_weights_fade_with_the_norm_and_share_by_tokens() -> None:
    even = Penalised().aggregate([X, Y], [1.0, 1.0])
    torch.testing.assert_close(even, (X + math.exp(-1) * Y) / (1 + math.exp(-1)))
    heavy = Penalised(temperature=2.0).aggregate([X, Y], [1.0, 3.0])
    torch.testing.assert_close(heavy, (X + 3 * math.exp(-0.5) * Y) / (1 + 3 * math.exp(-0.5)))


def test_what_is_far_longer_than_the_median_does_not_count_and_the_mean_is_clipped() -> None:
    huge = torch.tensor([1000.0, 0.0])
    kept = Penalised(temperature=1e30).aggregate([X, huge, X, X], [1.0, 2.0, 3.0, 4.0])
    assert torch.equal(kept, X)
    clipped = Penalised(temperature=1e30, max_norm=1.0).aggregate([X, X], [1.0, 1.0])
    torch.testing.assert_close(clipped, X / (5.0 + 1e-6))


def test_each_tensor_is_judged_by_itself_and_all_are_clipped_together() -> None:
    aggregator = Penalised(temperature=1e30, max_norm=1e9).shaped([(2,), (2,)])
    low, high = torch.cat([X, X]), torch.cat([X * 100, X])
    assert torch.equal(aggregator.aggregate([low, high, low], [1.0] * 3), low)
    nothing = torch.zeros(4)
    assert torch.equal(aggregator.aggregate([nothing, nothing], [1.0, 1.0]), nothing)
    mean = aggregator.aggregate([low, low * 1.1], [1.0, 2.0])
    torch.testing.assert_close(mean, weighted_mean([low, low * 1.1], [1.0, 2.0]))
