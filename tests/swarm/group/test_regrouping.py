from __future__ import annotations

import itertools

import pytest

from peer.swarm.group.regrouping import RegroupPolicy
from peer.swarm.runtime.timing import STANDARD


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_whoever_does_not_come_is_tried_ever_more_rarely():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    tries = []
    for _ in range(4000):
        if newcomers.among(["x"]):
            tries.append(clock.now)
            newcomers.missed(["x"])
        clock.now += 0.25
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert waits[0] == STANDARD.first_regroup_wait_s
    assert all(after == min(STANDARD.longest_regroup_wait_s, 2 * before) for before, after in itertools.pairwise(waits))
    assert waits[-1] == STANDARD.longest_regroup_wait_s


def test_whoever_came_is_a_newcomer_like_any_other_the_next_time():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    newcomers.missed(["x", "y"])
    assert newcomers.among(["z", "y", "x"]) == ["z"]
    newcomers.came(["x"])
    assert newcomers.among(["z", "y", "x"]) == ["x", "z"]


def test_missing_it_twice_in_one_wait_counts_once():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    newcomers.missed(["x"])
    newcomers.missed(["x"])
    clock.now += STANDARD.first_regroup_wait_s
    assert newcomers.among(["x"]) == ["x"]


def test_old_entries_are_forgotten():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    for number in range(1000):
        newcomers.missed([f"peer {number}"])
        clock.now += 1.0
    assert len(newcomers._waits) <= STANDARD.first_regroup_wait_s + STANDARD.longest_regroup_wait_s + 1


@pytest.mark.parametrize("how", ["announced", "invited"])
def test_whoever_shows_itself_is_honoured_once_in_each_wait(how):
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    shown = getattr(newcomers, how)
    tries = 0
    for _ in range(4 * 1000):  # somebody who shows itself without end, and with whom no group ever forms
        if shown("x") and newcomers.among(["x"]):
            tries += 1
            newcomers.missed(["x"])
        clock.now += 0.25
    quiet = RegroupPolicy(STANDARD, clock, 240.0)
    tries_without = 0
    for _ in range(4 * 1000):
        if quiet.among(["x"]):
            tries_without += 1
            quiet.missed(["x"])
        clock.now += 0.25
    assert tries_without < tries <= 2 * tries_without + 1
    assert shown("y")


def test_whoever_has_announced_itself_and_is_missed_all_the_same_may_invite():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    for _ in range(5):  # it was away for minutes, and group after group has formed without it
        newcomers.missed(["x"])
        clock.now += STANDARD.first_regroup_wait_s * 32
    newcomers.missed(["x"])
    for shown in (newcomers.announced, newcomers.invited):
        assert newcomers.among(["x"]) == []
        assert shown("x")
        assert newcomers.among(["x"]) == ["x"]
        if shown == newcomers.announced:
            newcomers.missed(["x"])  # it was still catching up: that is excused, once
            assert newcomers.among(["x"]) == ["x"]
        newcomers.missed(["x"])
        assert newcomers.among(["x"]) == []
        assert not shown("x")


def test_who_comes_back_sits_and_leaves_has_no_excuse():
    newcomers = RegroupPolicy(STANDARD, Clock(), 240.0)
    newcomers.announced("x")
    assert newcomers.sits("x")
    newcomers.left("x")
    assert newcomers.among(["x"]) == []
    assert not newcomers.sits("x")


def test_excuses_are_rare_and_forgotten():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    excused = 0
    for second in range(10 * int(STANDARD.excuse_period_s)):  # it announces itself each second, and is never in a group
        newcomers.announced("x")
        newcomers._waits.clear()
        newcomers.missed(["x"])
        excused += not newcomers._waits
        newcomers.announced(f"another {second}")
    assert excused == 1  # the clock has stood still
    for _ in range(10 * int(STANDARD.excuse_period_s)):
        clock.now += 1.0
        newcomers.announced("x")
        newcomers._waits.clear()
        newcomers.missed(["x"])
        excused += not newcomers._waits
    assert 10 <= excused <= 11
    assert len(newcomers._excuses) <= len(newcomers._excused) == 1


def test_nobody_interrupts_a_group_again_and_again():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    interrupted = []
    for _ in range(400):
        if newcomers.interrupts("x"):
            interrupted.append(clock.now)
        clock.now += 0.25
    assert interrupted == [100.0 + STANDARD.interrupt_pause_s * turn for turn in range(10)]
    assert newcomers.interrupts("y")
    clock.now += STANDARD.interrupt_pause_s
    assert newcomers.interrupts("z")
    assert list(newcomers._interrupted) == ["z"]


def test_who_sits_there_is_taken_in_each_time_unless_it_leaves_its_seat():
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 240.0)
    for _ in range(5):
        newcomers.missed(["x"])
        assert newcomers.among(["x"]) == []
        assert newcomers.sits("x")
        assert newcomers.among(["x"]) == ["x"]
    tries, turns = 0, 4 * 1000
    for _ in range(turns):  # somebody who sits down and leaves without end
        tries += newcomers.sits("y") and bool(newcomers.among(["y"]))
        newcomers.left("y")
        clock.now += 0.25
    assert 5 <= tries <= 2 + 0.25 * turns / STANDARD.first_regroup_wait_s / 20
    newcomers.came(["y"])
    assert newcomers.sits("y")


def test_who_leaves_the_lobby_keeps_nobody_out_of_a_full_group():
    """A stranger with a new key every few seconds would: no group has formed meanwhile."""
    clock = Clock()
    newcomers = RegroupPolicy(STANDARD, clock, 30.0)
    for number in range(10):
        newcomers.sits(f"stranger {number}")
        clock.now += 2.0
        newcomers.left(f"stranger {number}")
    assert newcomers.overdue()
