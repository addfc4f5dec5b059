"""The weighted mean."""

from __future__ import annotations

import math

import pytest
import torch

from peer.outer.aggregate import weighted_mean


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
