"""The window of a quorum on a swarm: what its members' rates and the rounds so far leave."""

from __future__ import annotations

import pytest

from peer.outer.policy.straggler import Quorum, WaitAll, close
from peer.swarm.group.pace import RoundPace


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def window(pace: RoundPace, *rates: float) -> float:
    policy = pace.of(rates)
    assert isinstance(policy, Quorum)
    return policy.window_s


def test_a_window_follows_the_fastest_member_and_what_rounds_took():
    time = Time()
    pace = RoundPace(Quorum(count=2, slack=0.5), 1000, 30.0, time)
    assert not pace.hurries
    assert window(pace) == 0.0  # nothing is known of them
    assert window(pace, 0.0, 100.0, 20.0) == 5.0  # half of 10 s
    for seconds in (2.0, 4.0, 90.0):
        pace.formed()
        time.now += seconds
        pace.committed()
    assert window(pace, 100.0) == 3.0  # half of 10 s - 4 s
    assert window(pace, 10.0) == 13.0  # no quorum waits longer than the run says


def test_a_round_of_all_waits_as_the_run_says():
    pace = RoundPace(WaitAll(), 1000, 30.0, Time())
    assert pace.hurries
    assert pace.of([100.0]) == WaitAll(deadline_s=30.0)


def test_a_false_claim_of_speed_shortens_the_window_by_a_bounded_factor():
    pace = RoundPace(Quorum(count=2, slack=0.5), 1000, 30.0, Time())
    honest = window(pace, 50.0, 50.0, 50.0)
    assert window(pace, 50.0, 50.0, 1e12) == pytest.approx(honest / 3)


def test_members_that_say_they_come_and_do_not_hold_a_quorum_up_for_the_window_alone():
    policy = RoundPace(Quorum(fraction=0.5), 1000, 30.0, Time()).of([100.0])
    there = {0: 1.0, 1: 2.0, 2: 3.0}
    assert close(policy, range(7), there, 30.9) is None
    assert close(policy, range(7), there, 31.0).members == (0, 1, 2)
