"""How long an exchange may take, and which members make it longer."""

from __future__ import annotations

from peer.swarm.round.deadline import ENOUGH, MULTIPLE, REMEMBERED, DeadlineEstimator, Lateness, usual_duration
from peer.swarm.runtime.timing import STANDARD

BYTES = 10_000_000
SOFT_S, LATE_S = STANDARD.soft_exchange_s, STANDARD.late_s


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


def rounds(lateness, count, arrivals, interval_s=6.0):
    """What members cost, by round."""
    costs = []
    for number in range(count):
        began = 1000.0 + number * interval_s
        sent = {peer_id: began + seconds for peer_id, seconds in arrivals.items()}
        costs.append(lateness.note(max(sent.values()), began, sent))
    return costs


def test_who_makes_every_round_wait_is_found_at_the_second():
    costs = rounds(Lateness(LATE_S), 4, {"a": 0.1, "b": 0.2, "x": 4.1})
    assert [sorted(each) for each in costs] == [[], ["x"], [], ["x"]]
    assert costs[1]["x"] == costs[3]["x"]
    assert 7.5 < costs[1]["x"] < 8.1


def test_a_wait_that_costs_little_of_the_time_or_is_no_habit_is_nothing():
    assert rounds(Lateness(LATE_S), 4, {"a": 0.1, "b": 0.2, "x": 0.9 * LATE_S}) == [{}] * 4
    # a slow line beside ten minutes of training
    assert rounds(Lateness(LATE_S), 4, {"a": 5.0, "b": 6.0, "x": 60.0}, interval_s=600.0)[1:] == [{}] * 3
    assert rounds(Lateness(LATE_S), 4, {"a": 5.0, "b": 6.0, "x": 14.0}, interval_s=20.0) == [{}] * 4  # all are slow
    lateness = Lateness(LATE_S)
    for number in range(10):
        assert rounds(lateness, 1, {"a": 0.1, "b": 0.2, "x": 4.0 if number % 2 else 0.3}) == [{}]
    assert rounds(Lateness(LATE_S), 4, {"x": 4.0}) == [{}] * 4  # of two, each could be the slow one
