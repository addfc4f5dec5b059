"""The best compute timeout for measured times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from peer.errors import UserError
from peer.outer.policy.compute_timeout import choose_timeout, effective_speedup


def test_a_timeout_beats_one_slow_worker() -> None:
    # 8 workers, 4 micro-batches of 1 s; one worker takes 10 s each: 31 s less for 4 of 32 micro-batches.
    samples = np.ones((1, 8, 4))
    samples[0, 7] = 10.0
    assert choose_timeout(samples, communication_s=1.0) == 4.0
    assert effective_speedup(samples, 1.0, np.array([4.0, 40.0])) == pytest.approx([41 / 5 * 28 / 32, 1.0])


def test_equal_workers_or_dear_communication_need_no_timeout() -> None:
    assert choose_timeout(np.ones((3, 4, 5)), communication_s=1.0) == math.inf
    samples = np.ones((1, 8, 4))
    samples[0, 7] = 1.25
    assert choose_timeout(samples, communication_s=1000.0) == math.inf


@given(
    seconds=st.lists(st.integers(1, 20), min_size=24, max_size=24),
    communication_s=st.integers(0, 30),
    extra=st.floats(0, 99),
)
def test_no_timeout_is_better_than_the_chosen(seconds: list[int], communication_s: int, extra: float) -> None:
    samples = np.array(seconds, dtype=np.float64).reshape(2, 3, 4)
    chosen = min(choose_timeout(samples, float(communication_s)), 1e9)
    best, other = effective_speedup(samples, float(communication_s), np.array([chosen, max(extra, 0.5)]))
    assert best >= max(1.0, other) - 1e-9


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.ones((2, 3)), r"shape \(2, 3\)"),
        (np.zeros((1, 1, 1)), "finite and above 0"),
    ],
)
def test_samples_that_mean_nothing_are_refused(samples: NDArray[np.float64], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        choose_timeout(samples, 1.0)
    assert error.value.hint
