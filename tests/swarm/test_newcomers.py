from __future__ import annotations

import itertools

from peer.swarm.newcomers import FIRST_WAIT_S, LONGEST_WAIT_S, Newcomers


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_whoever_does_not_come_is_tried_ever_more_rarely():
    clock = Clock()
    newcomers = Newcomers(clock)
    tries = []
    for _ in range(4000):
        if newcomers.among(["x"]):
            tries.append(clock.now)
            newcomers.missed(["x"])
        clock.now += 0.25
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert waits[0] == FIRST_WAIT_S
    assert all(after == min(LONGEST_WAIT_S, 2 * before) for before, after in itertools.pairwise(waits))
    assert waits[-1] == LONGEST_WAIT_S


def test_whoever_came_is_a_newcomer_like_any_other_the_next_time():
    clock = Clock()
    newcomers = Newcomers(clock)
    newcomers.missed(["x", "y"])
    assert newcomers.among(["z", "y", "x"]) == ["z"]
    newcomers.came(["x"])
    assert newcomers.among(["z", "y", "x"]) == ["x", "z"]


def test_missing_it_twice_in_one_wait_counts_once():
    clock = Clock()
    newcomers = Newcomers(clock)
    newcomers.missed(["x"])
    newcomers.missed(["x"])
    clock.now += FIRST_WAIT_S
    assert newcomers.among(["x"]) == ["x"]


def test_old_entries_are_forgotten():
    clock = Clock()
    newcomers = Newcomers(clock)
    for number in range(1000):
        newcomers.missed([f"peer {number}"])
        clock.now += 1.0
    assert len(newcomers._waits) <= FIRST_WAIT_S + LONGEST_WAIT_S + 1


def test_an_invitation_is_honoured_once_in_each_wait():
    clock = Clock()
    newcomers = Newcomers(clock)
    tries = 0
    for _ in range(4 * 1000):  # somebody who invites without end, and with whom no group ever forms
        if newcomers.invited("x") and newcomers.among(["x"]):
            tries += 1
            newcomers.missed(["x"])
        clock.now += 0.25
    quiet = Newcomers(clock)
    tries_without = 0
    for _ in range(4 * 1000):
        if quiet.among(["x"]):
            tries_without += 1
            quiet.missed(["x"])
        clock.now += 0.25
    assert tries_without < tries <= 2 * tries_without + 1
    assert newcomers.invited("y")
