"""How long an exchange may take."""

from __future__ import annotations

from peer.swarm.round.deadline import ENOUGH, MULTIPLE, REMEMBERED, DeadlineEstimator, usual_duration
from peer.swarm.runtime.timing import STANDARD

BYTES = 10_000_000
SOFT_S = STANDARD.soft_exchange_s


def estimator(cap_s=100.0):
    return DeadlineEstimator(cap_s, STANDARD.min_exchange_s, SOFT_S)


def test_the_deadline_is_a_small_multiple_of_what_rounds_took_lately():
    budget = estimator()
    assert budget.seconds(BYTES) == STANDARD.min_exchange_s + 2 * MULTIPLE * 10.0  # a first guess
    for _ in range(ENOUGH):
        budget.learn(BYTES, 2.0)
    assert budget.seconds(BYTES) == SOFT_S + MULTIPLE * 2.0
    assert budget.seconds(2 * BYTES) == SOFT_S + MULTIPLE * 4.0
    assert budget.seconds(BYTES, 3.0) == SOFT_S + MULTIPLE * 2.0 + 3.0
    assert budget.seconds(10**12) == budget.seconds(BYTES, 1e9) == 100.0
    for _ in range(REMEMBERED):
        budget.learn(BYTES, 5.0)
    assert budget.seconds(BYTES) == SOFT_S + MULTIPLE * 5.0


def test_some_long_rounds_change_nothing():
    budget = estimator()
    for number in range(REMEMBERED):
        budget.learn(BYTES, 90.0 if number % 3 == 0 else 1.0)
    assert budget.seconds(BYTES) == SOFT_S + MULTIPLE


def test_a_deadline_that_was_too_short_for_most_doubles_and_shrinks_again():
    budget = estimator()
    for _ in range(ENOUGH):
        budget.learn(BYTES, 1.0)
    seconds = budget.seconds(BYTES)
    for doubled in (2, 4, 8):
        budget.allow_longer(BYTES)
        assert budget.seconds(BYTES) == doubled * seconds
    for _ in range(20):
        budget.allow_longer(BYTES)
    assert budget.seconds(BYTES) == 100.0
    for _ in range(20):
        budget.learn(BYTES, 1.0)
    assert budget.seconds(BYTES) == seconds


def test_one_member_that_is_always_late_does_not_make_the_deadline_longer():
    budget, deadlines = estimator(), []
    for _ in range(50):
        late = 0.8 * budget.seconds(BYTES)
        sent = {"a": 100.3, "b": 100.4, "x": 100.0 + late}
        signed = {"a": 100.2 + late, "b": 100.2 + late, "x": 100.2 + late, "me": 100.1 + late}
        budget.learn(BYTES, usual_duration(100.0, sent, signed))
        deadlines.append(budget.seconds(BYTES))
    assert deadlines[-1] < SOFT_S + MULTIPLE * 0.7
    # the same with the shard that it reduces
    sent = {"a": 100.3, "b": 100.4, "x": 100.2}
    assert usual_duration(100.0, sent, {"a": 100.6, "b": 100.6, "x": 199.0, "me": 100.5}) < 0.7


def test_two_members_learn_what_the_slower_one_takes():
    """Else a pair on slow lines has the shortest deadline there is, fails, and the two refuse each other."""
    assert usual_duration(100.0, {"other": 105.0}, {"other": 107.0, "me": 105.5}) == 7.0
    assert usual_duration(100.0, {"a": 101.0, "x": 105.0}, {"a": 106.0, "x": 109.0, "me": 105.5}) == 2.0
