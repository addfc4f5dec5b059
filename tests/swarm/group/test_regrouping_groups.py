"""A persistent group: for which peers it forms again, and when its members, or those who are invited, are hurried."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.wire import InviteMessage, Kind, StatusMessage
from peer.swarm.group.invites import LAST_CALL
from peer.swarm.runtime.tasks import cancel_and_wait
from tests.swarm.gathering import INVITE_NAME, NEXT, PARENT, RUN, gather, until
from tests.swarm.virtual_time import now

pytestmark = pytest.mark.usefixtures("brisk")


async def test_a_persistent_group_forms_anew_for_whoever_it_lacks(network):
    first, second, third = await gather(network, 3)
    everybody = frozenset(member.peer_id for member in (first, second, third))
    assert first.matchmaker.newcomers(everybody) == []
    assert first.matchmaker.newcomers(everybody - {third.peer_id}) == [third.peer_id]
    third.training = False
    network.cut(third.peer_id)
    groups = await asyncio.gather(first.match(), second.match())
    first.matchmaker.included(groups[0])
    assert first.matchmaker.newcomers(everybody - {third.peer_id}) == []  # it did not come: not again so soon


async def test_a_full_group_forms_anew_only_now_and_then(network):
    first, second, third = await gather(network, 3, high=2)
    now = first.matchmaker._regrouping._formed
    for later, expected in ((14.9, []), (15.1, [third.peer_id])):  # half a straggler window
        first.matchmaker._regrouping._clock = lambda later=later: now + later
        assert first.matchmaker.newcomers(frozenset((first.peer_id, second.peer_id))) == expected
    first.matchmaker._regrouping._formed = now + 15.0
    assert first.matchmaker.newcomers(frozenset((first.peer_id, second.peer_id))) == []
    assert first.matchmaker.newcomers(frozenset((first.peer_id,))) == sorted((second.peer_id, third.peer_id))


async def test_whoever_announces_itself_from_behind_is_a_newcomer_before_the_directory_has_heard_of_it(network):
    first, second, late = await gather(network, 3)
    for member in (first, second):
        member.move(NEXT)
        member.directory.peers = {}
    stream = await late.hand_in(first, late.matchmaker._rosters.join(late.position, 100)[1])
    kind, _ = await stream.receive({Kind.REJECT: 10_000})
    assert kind is Kind.REJECT
    assert first.matchmaker.newcomers(frozenset((first.peer_id, second.peer_id))) == [late.peer_id]
    stream.close()


@pytest.mark.parametrize("level", [False, True], ids=["from behind", "level"])
async def test_a_group_that_has_given_somebody_up_takes_it_in_when_it_comes_back(network, level):
    """As a laptop that was closed for minutes: it comes itself, so that nobody waits for the next try."""
    first, second, late = await gather(network, 3)
    group = frozenset((first.peer_id, second.peer_id))
    for member in (first, second):
        member.move(NEXT)
    if level:
        late.move(NEXT)
    for tries in range(2):
        for _ in range(1 + tries):  # the first one after it has announced itself is excused: it had to catch up
            first.matchmaker._regrouping.missed([late.peer_id])
        assert first.matchmaker.newcomers(group) == []
        stream = await late.hand_in(first, late.matchmaker._rosters.join(late.position, 100)[1])
        if level:
            await until(lambda: late.peer_id in first.matchmaker._lobby)
        else:
            await stream.receive({Kind.REJECT: 10_000})
        assert first.matchmaker.newcomers(group) == ([] if tries else [late.peer_id])  # it may be a nuisance
        stream.close()
        await until(lambda: late.peer_id not in first.matchmaker._lobby)


async def test_a_member_that_waits_for_its_group_hears_of_who_sits_there(network):
    first, second, late, other = await gather(network, 4)
    group = frozenset((first.peer_id, second.peer_id, other.peer_id))
    first.matchmaker._regrouping.missed([late.peer_id])
    coming = asyncio.ensure_future(first.matchmaker.newcomer(group))
    streams = []
    for member in (other, late):  # one of the group itself is none
        streams.append(await member.hand_in(first, member.matchmaker._rosters.join(member.position, 100)[1]))
        await until(lambda member=member: member.peer_id in first.matchmaker._lobby)
        await asyncio.wait({coming}, timeout=0.05)
        assert coming.done() == (member is late)
    for stream in streams:
        stream.close()


async def test_who_sits_there_before_its_leader_is_level_is_taken_in_like_any_other(network):
    leader, second, late = await gather(network, 3)
    group = frozenset((leader.peer_id, second.peer_id))
    leader.matchmaker._regrouping.missed([late.peer_id])
    late.move(NEXT)  # it has caught up from a member that was quicker than its leader
    stream = await late.hand_in(leader, late.matchmaker._rosters.join(late.position, 100)[1])
    await until(lambda: late.peer_id in leader.matchmaker._lobby)
    assert leader.matchmaker.newcomers(group) == []
    leader.move(NEXT)
    assert leader.matchmaker.newcomers(group) == [late.peer_id]
    stream.close()


async def test_who_is_behind_is_told_by_how_much_and_need_not_ask_the_directory(network):
    leader, late = await gather(network, 2)
    leader.move(NEXT)
    late.matchmaker.membership.learn(leader.peer_id)  # as its directory has heard before
    with pytest.raises(RoundAborted, match=f"{leader.peer_id} is at round 6") as raised:
        await late.match()
    assert raised.value.behind
    assert late.nudges == [(leader.peer_id, NEXT)]


async def test_a_member_of_a_persistent_group_hurries_if_it_would_not_be_due_within_the_window(network):
    first, second = await gather(network, 2, wait=0.05)
    first.due_in_s, second.due_in_s = 1000.0, 0.04
    first.matchmaker.gathering()
    assert first.hurried.is_set()
    second.matchmaker.gathering()
    assert not second.hurried.is_set()
    await asyncio.wait_for(second.hurried.wait(), 5.0)  # the window has passed and it is still not due


@pytest.mark.parametrize("due_in_s", [0.0, 1000.0], ids=["by an old report", "but the trainer had not merged yet"])
async def test_a_member_is_hurried_after_the_window_whatever_it_heard_before(network, due_in_s):
    (member, _) = await gather(network, 2, wait=0.05)
    member.due_in_s = due_in_s
    member.matchmaker.gathering()
    member.hurried.clear()  # as if nobody had listened
    await asyncio.wait_for(member.hurried.wait(), 1.0)


async def test_who_is_less_than_halfway_is_not_hurried_by_whoever_is_first_until_the_last_call(network):
    leader, hasty, member = await gather(network, 3, wait=0.4)
    for slow in (leader, member):
        slow.due_in_s, slow.halfway = 1000.0, False
    began = now()
    waiting = asyncio.ensure_future(hasty.match())
    await until(lambda: leader.matchmaker.anybody_waiting)
    member.matchmaker.gathering()
    assert not leader.hurried.is_set()
    assert not member.hurried.is_set()
    await asyncio.wait_for(asyncio.gather(leader.hurried.wait(), member.hurried.wait()), 5.0)
    assert now() - began >= 0.99 * LAST_CALL * 0.4
    await cancel_and_wait([waiting])


@pytest.mark.parametrize(("committed", "wait_s"), [(True, 0.0), (True, 0.2), (False, 0.0)])
async def test_an_invitation_hurries_nobody_within_a_window_of_its_last_commit(network, committed, wait_s):
    """Whoever has caught up instead has nothing in that round."""
    leader, member = await gather(network, 2, wait=0.4)
    member.due_in_s, member.halfway = 1000.0, False
    member.matchmaker._invites._committed_at -= 10.0
    if committed:
        member.matchmaker._invites.committed()
    member.move(NEXT)
    moved = now()
    stream = await leader.node.open(member.peer_id, INVITE_NAME, "round")
    invite = InviteMessage(run_id=RUN, round=6, parent=NEXT, weight=200, wait_s=wait_s)
    leader.move(NEXT)
    member.matchmaker.membership.learn(leader.peer_id)
    await stream.send_message(Kind.INVITE, invite)
    status = await stream.receive_message(Kind.STATUS, StatusMessage)
    assert status.coming
    assert member.hurried.is_set() is not committed
    await asyncio.wait_for(member.hurried.wait(), 10.0)
    assert now() - moved >= (0.39 if committed else 0.0)
    stream.close()


async def test_a_wish_of_before_the_last_commit_hurries_nobody_after_it(network):
    leader, member = await gather(network, 2, wait=0.1)
    member.due_in_s, member.halfway = 1000.0, False
    stream = await leader.node.open(member.peer_id, INVITE_NAME, "round")
    await stream.send_message(Kind.INVITE, InviteMessage(run_id=RUN, round=5, parent=PARENT, weight=100, wait_s=0.1))
    await stream.receive_message(Kind.STATUS, StatusMessage)
    member.move(NEXT)
    again = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, again.set)
    await again.wait()
    assert not member.hurried.is_set()
    stream.close()


async def test_a_leader_that_is_not_due_has_everybody_come_before_the_window_of_who_waits_ends(network):
    leader, early, *others = await gather(network, 5, wait=4.0)
    for member in (leader, *others):
        member.due_in_s, member.halfway = 1000.0, False
    await asyncio.sleep(1.0)  # it has trained so long
    waiting = asyncio.ensure_future(early.match())
    contributions = [asyncio.ensure_future(contribute_when_hurried(member)) for member in (leader, *others)]
    groups = await asyncio.gather(waiting, *contributions)
    assert [len(group.members) for group in groups] == [5] * 5
    assert len({group.id for group in groups}) == 1


async def contribute_when_hurried(member):
    """What rounds do: match once there is a contribution."""
    await asyncio.wait_for(member.hurried.wait(), 10.0)
    return await member.match()


async def test_a_leader_invites_for_who_waited_before_it_came_to_that_round(network):
    leader, early, late = await gather(network, 3, wait=2.0)
    for member in (leader, late):
        member.due_in_s, member.halfway = 1000.0, False
    await asyncio.sleep(1.0)  # the first has trained so long
    early.move(NEXT)
    early.matchmaker.membership.learn(leader.peer_id)
    waiting = asyncio.ensure_future(early.match())
    await until(lambda: leader.matchmaker.anybody_waiting)
    leader.due_in_s = 0.0  # it is still in the round that ends with this move
    for member in (leader, late):
        member.move(NEXT)
    await asyncio.sleep(0)
    assert not leader.matchmaker._leader._invited
    leader.due_in_s = 1000.0
    contributions = [asyncio.ensure_future(contribute_when_hurried(member)) for member in (leader, late)]
    groups = await asyncio.gather(waiting, *contributions)
    assert [len(group.members) for group in groups] == [3] * 3


async def test_nobody_is_invited_any_more_once_nobody_waits(network):
    leader, early, other = await gather(network, 3, wait=30.0)
    leader.due_in_s = other.due_in_s = 1000.0
    leader.halfway = other.halfway = False
    stream = await early.hand_in(leader, early.matchmaker._rosters.join(early.position, 100)[1])
    await until(lambda: other.peer_id in leader.matchmaker._leader._invited)
    stream.close()
    network.cut(early.peer_id)
    await until(lambda: leader.matchmaker._leader._inviting.done())
    assert not leader.matchmaker._leader._invited
    assert not other.hurried.is_set()


async def test_a_full_group_is_not_hurried_by_those_whom_it_has_no_place_for(network):
    leader, member, outsider = await gather(network, 3, wait=0.2, high=2)
    leader.matchmaker._regrouping._full_s = 60.0  # it formed just now
    leader.due_in_s = member.due_in_s = 1000.0
    leader.halfway = member.halfway = False
    group = frozenset((leader.peer_id, member.peer_id))
    for each in (leader, member):
        each.itself.members = group
    stream = await outsider.hand_in(leader, outsider.matchmaker._rosters.join(outsider.position, 100)[1])
    await until(lambda: leader.matchmaker.anybody_waiting)
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, passed.set)
    await passed.wait()
    assert not leader.hurried.is_set()
    assert not member.hurried.is_set()
    assert not leader.matchmaker._leader._invited
    stream.close()


async def test_a_leader_that_comes_late_to_who_has_waited_long_forms_the_group(network):
    leader, early, silent = await gather(network, 3, wait=0.2)
    silent.due_in_s, silent.halfway = 1000.0, False  # it says that it is coming, and never comes
    leader.due_in_s, leader.halfway = 1000.0, False
    waiting = asyncio.ensure_future(early.match())
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, late.set)  # later than the window and the patience after it
    await late.wait()
    group = await leader.match()
    assert {member.peer_id for member in group.members} == {leader.peer_id, early.peer_id}
    assert (await waiting).id == group.id


async def test_who_was_invited_to_the_last_round_is_invited_to_this_one(network):
    leader, early, other = await gather(network, 3, wait=30.0)
    leader.due_in_s = other.due_in_s = 1000.0
    leader.halfway = other.halfway = False
    invited = leader.matchmaker._leader
    first = await early.hand_in(leader, early.matchmaker._rosters.join(early.position, 100)[1])
    await until(lambda: other.peer_id in invited._invited)
    before = invited._invited[other.peer_id]
    for member in (early, other):
        member.move(NEXT)
    early.matchmaker.membership.learn(leader.peer_id)
    second = await early.hand_in(leader, early.matchmaker._rosters.join(early.position, 100)[1])
    await until(lambda: leader.matchmaker._lobby._taken[early.peer_id].join.parent == NEXT)
    leader.move(NEXT)
    await until(lambda: other.peer_id in invited._invited and invited._invited[other.peer_id] is not before)
    await until(before.done)
    for stream in (first, second):
        stream.close()
