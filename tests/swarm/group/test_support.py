"""A leader waits for those that would not follow a round of so few."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.policy.straggler import Quorum, WaitAll
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.gathering import gather, names, together, until
from tests.swarm.virtual_time import now

pytestmark = pytest.mark.usefixtures("brisk")


async def test_a_quorum_without_which_the_others_would_not_follow_waits_for_them(network):
    leader, early, late = members = await gather(network, 3, straggler=Quorum(count=2))
    leader.needed = frozenset({late.peer_id})
    waiting = [asyncio.ensure_future(member.match()) for member in (leader, early)]
    await until(lambda: leader.asked)
    assert leader.asked[0] == {leader.peer_id, early.peer_id}
    groups = await together(late.match(), *waiting)
    assert [names(group) for group in groups] == [{member.peer_id for member in members}] * 3


async def test_such_a_quorum_waits_for_no_longer_than_the_window(network):
    leader, early, late = await gather(network, 3, wait=0.5, straggler=Quorum(count=2))
    leader.needed, late.due_in_s, began = frozenset({late.peer_id}), 60.0, now()
    groups = await together(leader.match(), early.match())
    assert now() - began >= 0.5
    assert [names(group) for group in groups] == [{leader.peer_id, early.peer_id}] * 2


async def test_a_round_of_too_few_waits_until_those_that_were_there_last_are_back(network):
    network.retime(support_s=20.0)
    leader, early, dead = members = await gather(network, 3)
    leader.needed = frozenset({dead.peer_id})
    for member in (leader, early):
        del member.directory.peers[dead.peer_id]
    waiting = [asyncio.ensure_future(member.match()) for member in (leader, early)]
    await until(lambda: {leader.peer_id, early.peer_id} in leader.asked)
    for member in (leader, early):
        member.directory.peers[dead.peer_id] = dead.record()
    groups = await together(dead.match(), *waiting)
    assert [names(group) for group in groups] == [{member.peer_id for member in members}] * 3


@pytest.mark.parametrize("straggler", [WaitAll(), Quorum(count=2)], ids=["all", "a quorum"])
async def test_a_round_of_too_few_begins_once_the_others_had_time_to_come_back(network, straggler):
    network.retime(support_s=0.6)
    leader, early, dead = await gather(network, 3, straggler=straggler)
    leader.needed, began = frozenset({dead.peer_id}), now()
    for member in (leader, early):
        del member.directory.peers[dead.peer_id]
    groups = await together(leader.match(), early.match())
    assert [names(group) for group in groups] == [{leader.peer_id, early.peer_id}] * 2
    waited_s = now() - began
    assert waited_s < 5.0  # the window is 30 s
    assert (waited_s >= 0.6) == isinstance(straggler, WaitAll)  # of an asynchronous recipe few make each round


@pytest.mark.parametrize("shown", [False, True], ids=["not in sight", "still in the directory"])
async def test_members_stay_with_a_leader_that_waits_for_those_that_have_gone(network, shown):
    network.retime(support_s=2.5)  # without it, members leave after a second
    leader, early, dead = await gather(network, 3, wait=0.5)
    leader.needed = early.needed = frozenset({dead.peer_id})
    del leader.directory.peers[dead.peer_id]
    if shown:  # a record outlives its peer
        early.directory.silent.add(dead.peer_id)
    else:
        del early.directory.peers[dead.peer_id]
    follower, handed_in = early.matchmaker._follower, []
    hand_in = follower._hand_in

    async def counted(*join):
        handed_in.append(join)
        return await hand_in(*join)

    follower._hand_in = counted
    groups = await together(leader.match(), early.match())
    assert [names(group) for group in groups] == [{leader.peer_id, early.peer_id}] * 2
    assert (len(handed_in), early.costs) == (1, [])


@pytest.mark.parametrize("silent", [False, True])
async def test_a_wait_costs_where_enough_others_announced_themselves_during_it(network, silent):
    leader, member, other = await gather(network, 3, wait=2.0)
    member.needed = frozenset({other.peer_id})
    member.directory.silent |= {other.peer_id} if silent else set()
    member.matchmaker._follower._waste(leader.peer_id, now() - 3.0)
    assert [(peer_id, round(seconds)) for peer_id, seconds in member.costs] == ([] if silent else [(leader.peer_id, 3)])
    member.matchmaker._follower._waste(leader.peer_id, now() - 2.0 - STANDARD.support_s - 1.0)
    assert member.costs[-1][0] == leader.peer_id  # longer than any leader may wait


@pytest.mark.parametrize("late_s", [0.5, 3.0])
async def test_a_group_that_its_leader_forms_late_costs(network, late_s):
    network.retime(solo_patience_s=1.0)
    leader, member = await gather(network, 2, wait=1.0)  # 2.25 s are free, and members stay for 3.25
    began, waiting = now(), asyncio.ensure_future(member.match())
    await until(lambda: len(leader.matchmaker._lobby) and now() >= began + late_s)
    await together(leader.match(), waiting)
    assert [peer_id for peer_id, _ in member.costs] == ([leader.peer_id] if late_s == 3.0 else [])


@pytest.mark.parametrize("low", [2, 3])
async def test_a_wait_costs_only_where_there_were_enough_for_a_round(network, low):
    leader, member = await gather(network, 2, wait=2.0, low=low)
    member.matchmaker._follower._waste(leader.peer_id, now() - 30.0)
    assert len(member.costs) == (low == 2)
