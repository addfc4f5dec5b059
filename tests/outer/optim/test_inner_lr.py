from __future__ import annotations

import math

import pytest

from peer.outer.optim.inner_lr import expected_steps, learning_rate
from peer.protocol.manifest import InnerSpec

INNER = InnerSpec(learning_rate=1.0, warmup_steps=10, min_learning_rate_ratio=0.1)
LONG_AGO = 1000


@pytest.mark.parametrize(("step", "total", "expected"), [
    (0, None, 0.1), (4, None, 0.5), (4.5, None, 0.55), (9, None, 1.0), (10**9, None, 1.0),
    (0, 110, 0.1), (10, 110, 1.0), (60, 110, 0.55), (110, 110, 0.1), (10**9, 110, 0.1),
    (35, 110, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))),
    (5, 5, 0.6), (11, 5, 0.1),
])
def test_exact_values(step, total, expected):
    assert learning_rate(INNER, step, total, LONG_AGO) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("since_join", "factor"), [(0, 0.1), (1, 0.2), (8, 0.9), (9, 1.0), (500, 1.0)])
def test_a_joiner_warms_up_its_own_moments(since_join, factor):
    assert learning_rate(INNER, 60, 110, since_join) == pytest.approx(0.55 * factor, abs=1e-15)


def test_no_warmup_starts_at_the_peak():
    inner = INNER.model_copy(update={"warmup_steps": 0, "learning_rate": 0.5})
    assert learning_rate(inner, 0, None, LONG_AGO) == 0.5
    assert learning_rate(inner, 0, 100, LONG_AGO) == 0.5
    assert learning_rate(inner, 50, 100, LONG_AGO) == pytest.approx(0.275, abs=1e-15)


def test_it_only_falls_after_warmup():
    rates = [learning_rate(INNER, step / 2, 110, LONG_AGO) for step in range(20, 240)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(("schedule", "step", "total", "expected"), [
    ("constant", 0, 110, 0.1), ("constant", 60, 110, 1.0), ("constant", 10**9, 110, 1.0),
    ("linear", 4, 110, 0.5), ("linear", 10, 110, 1.0), ("linear", 60, 110, 0.55), ("linear", 110, 110, 0.1),
    ("linear", 10**9, None, 1.0),
    ("wsd", 4, 110, 0.5), ("wsd", 60, 110, 1.0), ("wsd", 89, 110, 1.0), ("wsd", 110, 110, 0.1),
    ("wsd", 95, 110, 0.1 + 0.9 * 0.5), ("wsd", 10**9, None, 1.0),
])
def test_every_schedule(schedule, step, total, expected):
    inner = INNER.model_copy(update={"schedule": schedule})
    assert learning_rate(inner, step, total, LONG_AGO) == pytest.approx(expected, abs=1e-12)


def test_the_part_in_which_wsd_decays_is_the_manifests():
    inner = INNER.model_copy(update={"schedule": "wsd", "decay_fraction": 0.5})
    rates = [learning_rate(inner, step, 110, LONG_AGO) for step in (60, 61, 85, 110)]
    assert rates[0] == 1.0
    assert rates[1] < 1.0
    assert rates[2:] == pytest.approx([0.1 + 0.9 * (1 - math.sqrt(0.5)), 0.1])


def test_a_run_by_tokens_is_as_long_as_it_has_been_fast():
    assert expected_steps(100, 10_000, tokens=0, steps=0) == 100, "of one peer, while nothing is known"
    assert expected_steps(100, 10_000, tokens=2_000, steps=5) == 25, "four peers"
    assert expected_steps(100, 10_000, tokens=10_000, steps=25) == 25
