"""Who has been away and has caught up tells its last group, before the directory does."""

from __future__ import annotations

import asyncio

import pytest

from peer.swarm.runtime.timing import STANDARD
from tests.swarm.gathering import INVITE_NAME, NEXT, gather, names, together, until

pytestmark = pytest.mark.usefixtures("brisk")


async def returned(network, count, which):
    """Members whose directories have forgotten one of them, which remembers its last group; -> (it, the others)."""
    members = await gather(network, count)
    one = members.pop(which)
    for other in members:
        del other.directory.peers[one.peer_id]
    one.matchmaker.membership.company = tuple(other.peer_id for other in members)
    return one, members


@pytest.mark.parametrize("leads", [True, False])
async def test_the_next_round_has_it_though_no_directory_shows_it(network, leads):
    one, others = await returned(network, 3, 0 if leads else 2)
    assert all(one.peer_id not in other.matchmaker.membership.expected() for other in others)
    one.matchmaker.caught_up()
    await until(lambda: all(one.peer_id in other.matchmaker.membership.expected() for other in others))
    leader = one if leads else others[0]
    assert {other.matchmaker.membership.leader() for other in others} == {leader.peer_id}
    groups = await together(*(member.match() for member in (*others, one)))
    assert {len(names(group)) for group in groups} == {3}


async def test_nobody_is_hurried_by_it(network):
    """It may have to train a whole contribution itself, and asks the others to come as soon as it is due."""
    one, others = await returned(network, 3, 0)
    for other, due_in_s in zip(others, (4.0, 900.0), strict=True):
        other.due_in_s = due_in_s
    one.matchmaker.caught_up()
    await until(lambda: all(one.peer_id in other.matchmaker.membership.expected() for other in others))
    assert [other.hurried.is_set() for other in others] == [False, False]


async def test_who_commits_a_round_without_it_says_so(network):
    one, others = await returned(network, 3, 2)
    one.matchmaker.caught_up()
    await until(lambda: all(other.matchmaker._invites._inviters for other in others))
    others[0].move(NEXT)
    await until(lambda: one.nudges)
    assert one.nudges == [(others[0].peer_id, NEXT)]


async def test_who_is_in_a_group_says_no_more_that_it_is_back(network):
    one, others = await returned(network, 2, 1)
    one.matchmaker.caught_up()
    await until(lambda: others[0].matchmaker._invites._inviters)
    group, _ = await together(one.match(), others[0].match())
    assert others[0].matchmaker._invites._inviters
    one.matchmaker.included(group)
    await until(lambda: not others[0].matchmaker._invites._inviters)


async def test_it_is_not_said_for_ever(network):
    """Whoever has an invitation from another waits only half as long for its leader to speak."""
    network.retime(refresh_period_s=0.05 / 3)
    one, others = await returned(network, 3, 2)
    one.matchmaker.caught_up()
    await until(lambda: all(other.matchmaker._invites._inviters for other in others))
    await until(lambda: not any(other.matchmaker._invites._inviters for other in others))


async def test_it_finds_out_who_sleeps_before_it_waits_there(network):
    one, others = await returned(network, 3, 2)
    for_ever = asyncio.Event()

    async def silence(_):
        await for_ever.wait()

    await others[0].node.serve(INVITE_NAME, "round", silence)
    assert one.matchmaker.membership.leader() == others[0].peer_id
    one.matchmaker.caught_up()
    await until(lambda: one.matchmaker.membership.leader() == others[1].peer_id)
    for_ever.set()


async def test_it_is_said_now_and_then_and_not_where_it_would_call_for_a_round(network):
    one, _ = await returned(network, 2, 1)
    matchmaker, now = one.matchmaker, [100.0]
    matchmaker._returning._clock = lambda: now[0]
    matchmaker.caught_up()
    (first,) = matchmaker._returning._saying
    now[0] += 0.9 * STANDARD.return_period_s
    matchmaker.caught_up()
    assert matchmaker._returning._saying == (first,)
    now[0] += 0.2 * STANDARD.return_period_s
    one.itself.called = True
    matchmaker.caught_up()
    assert matchmaker._returning._saying == (first,)
    one.itself.called = False
    matchmaker.caught_up()
    assert len(matchmaker._returning._saying) == 1
    assert matchmaker._returning._saying != (first,)
    await until(first.cancelled)
