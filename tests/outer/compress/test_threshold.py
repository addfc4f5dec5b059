"""A hard threshold: what passes, how it is kept, how large a payload can become."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.outer.compress.base import NonFiniteError, PayloadError
from peer.outer.compress.registry import codec
from peer.outer.compress.threshold import Threshold, kth_magnitude
from tests.outer.compress.vectors import MAKERS, Make, constant, gaussian, student_t3


def threshold(name: str) -> Threshold:
    parts = codec(name)
    assert isinstance(parts, Threshold)
    return parts


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1000, 1), (1000, 999), (1000, 1000), (300_001, 3000)])
def test_the_kth_magnitude_is_exact(make: Make, n: int, k: int) -> None:
    x = make(n)
    assert kth_magnitude(x, k) == x.abs().sort(descending=True).values[k - 1].item()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30), st.data())
def test_the_kth_magnitude_is_exact_for_any_floats(values: list[float], data: st.DataObject) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    k = data.draw(st.integers(1, len(values)))
    assert kth_magnitude(x, k) == x.abs().sort(descending=True).values[k - 1].item()


@pytest.mark.parametrize("n", [1, 100, 65_536, 65_537, 200_001])
def test_everything_above_is_sent_and_nothing_below(n: int) -> None:
    x, parts = student_t3(n), threshold("threshold0.01+fp32")
    cut = x.abs().topk(math.ceil(0.01 * n)).values[-1]
    payload = parts.encode(x)
    assert torch.equal(parts.decode(payload, n), torch.where(x.abs() >= cut, x, 0.0))
    assert len(payload) == 4 * math.ceil(n / 65_536) + 6 * math.ceil(0.01 * n) <= parts.wire_bytes(n)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["threshold0.01+int4", "threshold0.3+sign", "threshold1+fp32"])
def test_payloads_stay_within_the_stated_size(make: Make, name: str) -> None:
    for n in (0, 1, 1000, 70_001):
        x, parts = make(n), threshold(name)
        payload = parts.encode(x)
        decoded = parts.decode(payload, n)
        assert len(payload) <= parts.wire_bytes(n)
        assert torch.isfinite(decoded).all()
        assert (decoded.double() - x.double()).norm() <= (1 + 2.0**-7) * x.double().norm() + 1e-30


def test_a_ratio_of_one_is_dense() -> None:
    x, parts = gaussian(70_001), threshold("threshold1+fp32")
    assert torch.equal(parts.decode(parts.encode(x), x.numel()), x)


def test_zeros_are_never_sent() -> None:
    assert len(threshold("threshold0.5+fp32").encode(torch.zeros(1000))) == 4


def test_of_many_equal_values_the_first_are_sent() -> None:
    x, parts = constant(1000), threshold("threshold0.1+fp32")
    decoded = parts.decode(parts.encode(x), 1000)
    assert torch.equal(decoded[:200], x[:200])
    assert not decoded[200:].any()


def test_a_threshold_is_kept_until_twice_as_many_values_pass() -> None:
    x, parts = gaussian(10_000), threshold("threshold0.01+fp32")
    first = parts.tuned(x, None)
    assert first.at == x.abs().topk(100).values[-1].item()
    assert parts.tuned(1.1 * x, first.at).at == first.at
    assert parts.tuned(0.1 * x, first.at).at == first.at  # nothing passes: nothing is sent
    assert parts.decode(parts.tuned(0.1 * x, first.at).encode(0.1 * x), 10_000).any() == False  # noqa: E712
    assert parts.tuned(10 * x, first.at).at == pytest.approx(10 * first.at)


def test_it_does_not_have_a_fixed_size_and_ignores_shapes_and_seeds() -> None:
    parts = threshold("threshold0.01@5+int8")
    assert not parts.fixed_size
    assert parts.every == 5
    assert parts.bind([(3, 4)]) is parts.seeded(3) is parts


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_input_is_refused(bad: float) -> None:
    x, parts = gaussian(1000), threshold("threshold0.01+int8")
    tuned = parts.tuned(x, None)
    x[77] = bad
    with pytest.raises(NonFiniteError):
        parts.encode(x)
    with pytest.raises(NonFiniteError):
        tuned.encode(x)


def test_counts_and_positions_are_checked() -> None:
    parts = threshold("threshold0.5+fp32")
    good = bytearray(parts.encode(torch.tensor([0.0, 2.0, 0.0, 3.0])))
    assert good[:8] == bytes([2, 0, 0, 0, 1, 0, 3, 0])
    for at, value in ((0, 1), (0, 3), (3, 255), (4, 3), (6, 4)):
        bad = bytearray(good)
        bad[at] = value
        with pytest.raises(PayloadError):
            parts.decode(bad, 4)
    for size in (0, 3, 15, 17, 400):
        with pytest.raises(PayloadError):
            parts.decode(bytes(size), 4)
