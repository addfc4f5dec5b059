"""When rounds start without the late, and what the late weigh."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import UserError
from peer.outer.aggregate.base import weighted_mean
from peer.outer.policy.backup import Backup
from peer.outer.policy.straggler import Close, ComputeTimeout, Quorum, StragglerPolicy, WaitAll, close

POLICIES: list[StragglerPolicy] = [
    WaitAll(),
    WaitAll(deadline_s=3.0),
    Quorum(count=3, grace_s=1.5),
    Quorum(fraction=0.5),
    Backup(window=3),
    Backup(window=4, minimum=3, deadline_s=5.0),
    ComputeTimeout(tau_s=1.0),
]
ARRIVED = {0: 10.0, 1: 12.0, 2: 15.0, 3: 40.0}
arrivals = st.dictionaries(st.integers(0, 7), st.integers(0, 40).map(lambda quarter: quarter / 4), max_size=8)


def at(start_s: float, *members: int) -> Close:
    return Close(start_s=start_s, members=members)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (WaitAll(), at(40.0, 0, 1, 2, 3)),
        (WaitAll(deadline_s=20.0), at(30.0, 0, 1, 2)),
        (WaitAll(deadline_s=100.0), at(40.0, 0, 1, 2, 3)),
        (WaitAll(deadline_s=0.0), at(10.0, 0)),
        (Quorum(count=2), at(12.0, 0, 1)),
        (Quorum(count=2, grace_s=3.0), at(15.0, 0, 1, 2)),
        (Quorum(count=2, grace_s=60.0), at(40.0, 0, 1, 2, 3)),
        (Quorum(fraction=0.6), at(15.0, 0, 1, 2)),
        (Quorum(count=9), at(40.0, 0, 1, 2, 3)),
        (Backup(window=1), at(40.0, 0, 1, 2, 3)),
        (Backup(window=8), at(12.0, 0, 1)),
        (Backup(window=8, minimum=3), at(15.0, 0, 1, 2)),
        (Backup(window=1, deadline_s=6.0), at(16.0, 0, 1, 2)),
        (ComputeTimeout(tau_s=5.0), at(40.0, 0, 1, 2, 3)),
    ],
    ids=repr,
)
def test_when_a_round_starts_and_with_whom(policy: StragglerPolicy, expected: Close) -> None:
    assert policy.next_decision(range(4), ARRIVED) == expected


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_nobody_there_means_waiting(policy: StragglerPolicy) -> None:
    assert policy.next_decision(range(4), {}) is None
    assert policy.next_decision([], {}) is None


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(arrived=arrivals, rounds=st.lists(st.sets(st.integers(0, 7), min_size=1).map(tuple), max_size=5))
def test_decisions_need_no_future(
    policy: StragglerPolicy, arrived: dict[int, float], rounds: list[tuple[int, ...]]
) -> None:
    final = policy.next_decision(range(6), arrived, rounds)
    moments = sorted({*arrived.values(), *(quarter / 4 for quarter in range(0, 80, 3))})
    polled = next((found for now in moments if (found := close(policy, range(6), arrived, now, rounds))), None)
    assert polled == final
    if final is not None:
        assert final.members == tuple(sorted(member for member, time in arrived.items() if time <= final.start_s))
        before = {member: time for member, time in arrived.items() if time < final.start_s}
        waiting = policy.next_decision(range(6), before, rounds)
        assert waiting is None or waiting.start_s >= final.start_s


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(arrived=arrivals)
def test_clocks_may_have_any_origin(policy: StragglerPolicy, arrived: dict[int, float]) -> None:
    here = policy.next_decision(range(6), arrived)
    there = policy.next_decision(range(6), {member: time + 1024.0 for member, time in arrived.items()})
    assert there == (None if here is None else Close(start_s=here.start_s + 1024.0, members=here.members))


def test_a_full_quorum_of_equal_peers_is_synchronous() -> None:
    arrived = dict.fromkeys(range(4), 7.0)
    quorum = Quorum(count=4, grace_s=2.0)
    assert quorum.next_decision(range(4), arrived) == WaitAll().next_decision(range(4), arrived) == at(7.0, 0, 1, 2, 3)
    weights = [quorum.weight(0, 4)] * 4
    vectors = list(torch.randn(4, 50, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(weighted_mean(vectors, weights), weighted_mean(vectors, [1.0] * 4))


def test_stale_contributions_weigh_less() -> None:
    assert Quorum(count=4).weight(3, 4) == pytest.approx(0.25)
    assert Quorum(count=2).weight(0, 1) == 1.0
    assert Quorum(count=2, discount_stale=False).weight(3, 4) == 1.0
    assert WaitAll().weight(3, 4) == 1.0


@given(
    window=st.integers(1, 6),
    orders=st.lists(st.permutations(range(6)), min_size=12, max_size=12),
    minimum=st.integers(1, 3),
)
def test_the_rounds_of_every_window_connect_all(window: int, orders: list[list[int]], minimum: int) -> None:
    policy = Backup(window=window, minimum=minimum)
    closed: list[tuple[int, ...]] = []
    for order in orders:
        found = policy.next_decision(range(6), {member: float(place) for place, member in enumerate(order)}, closed)
        assert found is not None
        assert len(found.members) >= minimum
        closed.append(found.members)
    for start in range(0, len(closed) - window + 1, window):
        reached, groups = {0}, closed[start : start + window]
        for _ in groups:
            reached = reached.union(*(group for group in groups if reached & set(group)))
        assert reached == set(range(6))


def test_the_number_of_backup_members_changes_by_round() -> None:
    policy, closed = Backup(window=3), []
    for _ in range(4):
        found = policy.next_decision(range(6), {member: float(member) for member in range(6)}, closed)
        assert found is not None
        closed.append(found.members)
    # The two fastest suffice, until the slowest must be connected: first to reach three components, then all.
    assert closed == [(0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3)]
    assert Backup(window=9).next_decision(range(6), {0: 0.0, 1: 1.0, 5: 2.0}, [(0, 1)]) == at(2.0, 0, 1, 5)


def test_micro_batches_are_counted_and_gradients_divided() -> None:
    assert ComputeTimeout(tau_s=2.0).count([1.0, 1.0, 0.5]) == 2
    assert ComputeTimeout(tau_s=0.5).count([1.0, 1.0]) == 0
    assert ComputeTimeout().count([1.0] * 9) == 9  # infinity is plain data parallelism


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WaitAll(deadline_s=-1.0), "deadline_s=-1.0: must be finite and at least 0"),
        (lambda: Quorum(), "count=None and fraction=None: give exactly one"),
        (lambda: Quorum(count=1, fraction=0.5), "give exactly one"),
        (lambda: Quorum(count=0), "count=0: must be at least 1"),
        (lambda: Quorum(fraction=1.5), r"fraction=1.5: must be in \(0, 1\]"),
        (lambda: Quorum(count=1, grace_s=math.nan), "grace_s=nan"),
        (lambda: Backup(window=0), "window=0: must be at least 1 round"),
        (lambda: Backup(window=1, minimum=0), "minimum=0: must be at least 1 member"),
        (lambda: ComputeTimeout(tau_s=0.0), "tau_s=0.0: must be above 0"),
        (lambda: ComputeTimeout(normalise="mean"), "normalise='mean'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=message) as error:
        make()
    assert error.value.hint


def test_a_quorums_window_is_a_share_of_what_the_first_member_has_to_spare():
    quorum = Quorum(count=2, grace_s=1.0, slack=0.5)
    arrived = {0: 10.0, 1: 12.0}
    assert next_start(quorum, arrived) == 13.0
    assert next_start(quorum.paced(12.0, 2.0), arrived) == 15.0  # 10 + .5 (12 - 2)
    assert next_start(quorum.paced(3.0, 2.0), arrived) == 13.0
    assert next_start(quorum.paced(1.0, 2.0), arrived) == 13.0
    assert next_start(quorum.paced(12.0, 2.0), arrived | {2: 14.0}) == 14.0  # all are there
    assert WaitAll(deadline_s=4.0).paced(12.0, 2.0) == WaitAll(deadline_s=4.0)
    assert ComputeTimeout(tau_s=1.0).within(4.0).deadline_s == 4.0
    assert Backup(window=3).within(5.0).within(9.0) == Backup(window=3, deadline_s=5.0)
    assert (Backup(window=3).period, WaitAll().period) == (3, 1)
    with pytest.raises(UserError, match=r"slack=1\.5: must be in \[0, 1\]"):
        Quorum(count=2, slack=1.5)


def next_start(policy: StragglerPolicy, arrived: dict[int, float]) -> float | None:
    decision = policy.next_decision(range(3), arrived)
    return None if decision is None else decision.start_s
