from __future__ import annotations

import asyncio

import pytest

from peer.outer.policy.straggler import Quorum
from peer.outer.round import RoundAborted
from peer.protocol.wire import InviteMessage, Kind, RejectMessage, StatusMessage
from peer.swarm.group.roster import roster_order
from peer.swarm.runtime.tasks import cancel_and_wait
from tests.swarm.gathering import (
    INVITE_NAME,
    NEXT,
    NOMINAL,
    PARENT,
    RUN,
    gather,
    join_of,
    names,
    together,
    until,
)
from tests.swarm.virtual_time import now

pytestmark = pytest.mark.usefixtures("brisk")


@pytest.mark.parametrize("count", [2, 3, 6])
async def test_everybody_finds_the_same_group_at_once(network, count):
    members = await gather(network, count)
    began = now()
    groups = await together(*(member.match(tokens=100 * (i + 1)) for i, member in enumerate(members)))
    assert now() - began < 5.0  # the window is 30 s
    assert len({group.id for group in groups}) == 1
    order = [member.peer_id for member in groups[0].members]
    assert order == roster_order(groups[0].join.run_id, [member.peer_id for member in members])
    for number, (member, group) in enumerate(zip(members, groups, strict=True)):
        assert group.members == groups[0].members
        assert group.me == member.peer_id
        assert (group.join.round, group.join.parent, group.join.tokens) == (5, PARENT, 100 * (number + 1))


async def test_a_weight_is_capped_at_the_nominal_tokens(network):
    members = await gather(network, 2)
    groups = await together(members[0].match(tokens=30), members[1].match(tokens=50 * NOMINAL))
    tokens = {member.peer_id: member.tokens for member in groups[0].members}
    assert tokens == {members[0].peer_id: 30, members[1].peer_id: NOMINAL}
    assert groups[0].members == groups[1].members


async def test_the_lowest_hash_leads_whoever_is_due_first(network):
    members = await gather(network, 3)
    members[0].due_in_s = 1.0
    followers = [asyncio.ensure_future(member.match()) for member in members[1:]]
    await until(lambda: len(members[0].matchmaker._lobby) == 2)
    assert not members[1].matchmaker.anybody_waiting
    assert not members[0].hurried.is_set()  # due within the window anyway
    groups = await together(members[0].match(), *followers)
    assert len({group.id for group in groups}) == 1


async def test_a_leader_that_is_not_due_within_the_window_hurries(network):
    leader, member = await gather(network, 2, wait=30.0)
    leader.due_in_s = 31.0
    waiting = asyncio.ensure_future(member.match())
    await asyncio.wait_for(leader.hurried.wait(), 5.0)
    assert len({group.id for group in await together(leader.match(), waiting)}) == 1


async def test_a_newcomer_is_invited_before_it_is_due(network):
    leader, member, newcomer = await gather(network, 3, wait=30.0)
    newcomer.due_in_s = 100.0
    waiting = [asyncio.ensure_future(one.match()) for one in (leader, member)]
    await asyncio.wait_for(newcomer.hurried.wait(), 5.0)
    assert not member.hurried.is_set()
    groups = await together(newcomer.match(), *waiting)
    assert {len(group.members) for group in groups} == {3}


async def test_a_group_waits_its_window_for_a_straggler_and_no_longer(network):
    leader, member, straggler = await gather(network, 3, wait=0.5)
    began = now()
    groups = await together(leader.match(), member.match())
    assert 0.4 <= now() - began < 3.0
    assert [names(group) for group in groups] == [{leader.peer_id, member.peer_id}] * 2
    assert straggler.hurried.is_set() is False


async def test_a_leader_forms_the_group_when_the_recipes_quorum_is_there(network):
    members = await gather(network, 3, straggler=Quorum(count=2))
    members[2].due_in_s = 60.0
    began = now()
    groups = await together(*(member.match() for member in members[:2]))
    assert now() - began < 5.0  # the window is 30 s
    assert {names(group) == {member.peer_id for member in members[:2]} for group in groups} == {True}


async def test_a_quorum_that_is_smaller_than_a_group_hurries_no_leader(network):
    leader, early, late = await gather(network, 3, wait=120.0, low=3, straggler=Quorum(count=1))
    leader.due_in_s = 60.0
    waiting = [asyncio.ensure_future(early.match())]
    await until(lambda: leader.matchmaker.anybody_waiting)
    assert leader.matchmaker._leader.quorum_in_s() is None
    waiting.append(asyncio.ensure_future(late.match()))
    await asyncio.wait_for(leader.hurried.wait(), 5.0)
    await cancel_and_wait(waiting)


async def test_dead_and_finished_peers_are_not_waited_for(network):
    leader, member, dead, finished, joining = await gather(network, 5, wait=30.0)
    network.cut(dead.peer_id)
    for one in (leader, member):
        one.directory.peers[finished.peer_id] = finished.record(state="finished")
    joining.training = False
    began = now()
    groups = await together(leader.match(), member.match())
    assert now() - began < 5.0
    assert [names(group) for group in groups] == [{leader.peer_id, member.peer_id}] * 2


async def test_a_member_that_dies_on_its_way_is_dropped_at_once(network):
    leader, member, dying = await gather(network, 3, wait=30.0)
    invited = asyncio.Event()

    async def promise_and_die(stream):
        await stream.receive_message(Kind.INVITE, InviteMessage)
        status = StatusMessage(coming=True, round=5, lineage_id=PARENT, weight=100, leader=leader.peer_id)
        await stream.send_message(Kind.STATUS, status)
        invited.set()

    await dying.node.serve(INVITE_NAME, "round", promise_and_die)
    groups = await together(leader.match(), member.match())
    assert invited.is_set()
    assert [names(group) for group in groups] == [{leader.peer_id, member.peer_id}] * 2


async def test_a_seat_is_free_when_its_member_dies(network):
    leader, member, dying = await gather(network, 3, wait=0.5)
    stream = await dying.hand_in(leader, join_of(dying.node.identity)[0])
    waiting = asyncio.ensure_future(member.match())
    await until(lambda: len(leader.matchmaker._lobby) == 2)
    stream.close()
    network.cut(dying.peer_id)
    await until(lambda: len(leader.matchmaker._lobby) == 1)
    group, _ = await together(leader.match(), waiting)
    assert names(group) == {leader.peer_id, member.peer_id}


async def test_a_group_one_of_whom_left_as_it_formed_is_declined_by_its_leader(network):
    leader, member, leaving = await gather(network, 3, wait=30.0)
    declined = []
    leader.itself.decline = lambda group, abort: declined.append((names(group), abort.culprit))
    lead, follow, leave = (asyncio.ensure_future(each.match()) for each in (leader, member, leaving))
    seats = leader.matchmaker._lobby
    write = leader.matchmaker._rosters.write

    def write_late(*joins):
        """The roster is fixed, and before it is sent somebody is gone."""
        for peer_id, seat in seats.present(PARENT).items():
            if peer_id == leaving.peer_id:
                seat.stream.close()
        return write(*joins)

    leader.matchmaker._rosters.write = write_late
    with pytest.raises(RoundAborted, match=f"{leaving.peer_id} left while the roster was sent") as caught:
        await lead
    assert caught.value.instead == "retry"
    assert declined == [({leader.peer_id, member.peer_id, leaving.peer_id}, leaving.peer_id)]
    assert names(await follow) == {leader.peer_id, member.peer_id, leaving.peer_id}  # who has the roster begins
    await cancel_and_wait([leave])


async def test_the_group_goes_on_when_its_leader_is_dead(network):
    dead, second, third = await gather(network, 3, wait=30.0)
    network.cut(dead.peer_id)
    groups = await together(second.match(), third.match())
    assert [names(group) for group in groups] == [{second.peer_id, third.peer_id}] * 2


async def test_a_group_has_a_limit(network):
    members = await gather(network, 4, wait=1.0, high=3)
    works = [asyncio.ensure_future(member.match()) for member in members]
    await until(lambda: sum(task.done() for task in works) == 3)
    group = works[0].result()
    assert len(group.members) == 3
    assert {task.result().id for task in works if task.done()} == {group.id}
    await cancel_and_wait(works)


async def test_a_client_is_nobodys_leader(network):
    client, second, third = await gather(network, 3, clients=(0,))
    assert {member.matchmaker.membership.leader() for member in (client, second, third)} == {second.peer_id}
    groups = await together(client.match(), second.match(), third.match())
    assert {len(group.members) for group in groups} == {3}


async def test_a_client_alone_does_not_wait_for_another(network):
    client, other = await gather(network, 2, clients=(0, 1))
    network.cut(client.peer_id)
    network.cut(other.peer_id)
    with pytest.raises(RoundAborted, match="1 of at least 2 peers") as caught:
        await client.match()
    assert caught.value.alone


async def test_a_group_takes_in_one_client(network):
    members = await gather(network, 4, wait=1.0, clients=(1, 3))
    works = [asyncio.ensure_future(member.match()) for member in members]
    await until(lambda: sum(task.done() for task in works) == 3)
    taken = names(works[0].result())
    assert len(taken) == 3
    assert {members[0].peer_id, members[2].peer_id} < taken
    assert {task.result().id for task in works if task.done()} == {works[0].result().id}
    await cancel_and_wait(works)


async def test_a_group_takes_in_clients_that_a_relay_serves_until_a_round_fails_through_one(network):
    leader, first, second = await gather(network, 3, wait=0.2, clients=(1, 2))
    for member in (leader, first):
        member.directory.peers[second.peer_id] = second.record(relayed=True)
    groups = await together(*(member.match() for member in (leader, first, second)))
    assert {len(group.members) for group in groups} == {3}
    assert leader.matchmaker.newcomers(frozenset((leader.peer_id, first.peer_id))) == [second.peer_id]
    leader.matchmaker.membership.doubt_relay(second.peer_id)
    leader.matchmaker.membership.doubt_relay(leader.peer_id)  # no client: nothing to doubt
    assert leader.matchmaker.newcomers(frozenset((leader.peer_id, first.peer_id))) == []
    assert not leader.matchmaker.membership.solitary(leader.peer_id)


async def test_clients_have_turns(network):
    leader, first, second = await gather(network, 3, clients=(1, 2))
    pair = frozenset((leader.peer_id, first.peer_id))
    now = leader.matchmaker._regrouping._formed
    for later, expected in ((14.9, []), (15.1, [second.peer_id])):  # half a straggler window
        leader.matchmaker._regrouping._clock = lambda later=later: now + later
        assert leader.matchmaker.newcomers(pair) == expected
    leader.matchmaker._regrouping._formed = now + 15.0
    assert leader.matchmaker.newcomers(frozenset((leader.peer_id,))) == sorted((first.peer_id, second.peer_id))


async def test_a_peer_on_its_own_says_so(network):
    (lonely,) = await gather(network, 1)
    with pytest.raises(RoundAborted, match="1 of at least 2 peers") as caught:
        await lonely.match()
    assert caught.value.alone


async def test_too_few_for_the_run_is_no_group(network):
    members = await gather(network, 2, wait=0.3, low=3)
    with pytest.raises(RoundAborted, match="2 of at least 3 peers") as caught:
        await asyncio.wait_for(asyncio.gather(*(member.match() for member in members)), 10.0)
    assert caught.value.alone


async def test_whoever_is_behind_is_told_so(network):
    leader, member = await gather(network, 2)
    leader.move(NEXT)
    with pytest.raises(RoundAborted, match="is at round 6") as caught:
        await member.match()
    assert caught.value.behind


async def test_a_leader_that_learns_of_a_heavier_lineage_says_that_it_is_behind(network):
    leader, member = await gather(network, 2)
    member.move(NEXT)
    with pytest.raises(RoundAborted, match="heavier lineage") as caught:
        await leader.match()
    assert (caught.value.behind, caught.value.culprit) == (True, member.peer_id)
    assert leader.nudges[0][0] == member.peer_id


async def test_a_heavier_lineage_that_nobody_has_shown_holds_up_no_leader(network):
    """One such answer stopped all rounds for a minute, and made the members leave a leader that was honest."""
    leader, first, liar = await gather(network, 3, wait=0.5)
    liar.move(NEXT)
    leader.itself.ahead = lambda: None  # its scout has looked, or still does
    groups = await together(leader.match(), first.match())
    assert [names(group) for group in groups] == [{leader.peer_id, first.peer_id}] * 2
    assert (leader.nudges[0][0], first.costs) == (liar.peer_id, [])


async def test_a_member_that_is_ready_first_waits_until_its_leader_has_committed_too(network):
    leader, member = await gather(network, 2)
    groups = await together(leader.match(), member.match())
    member.commit(groups[1], NEXT)  # the directory still shows the leader at the old lineage id
    waiting = asyncio.ensure_future(member.match())
    await until(lambda: leader.matchmaker.anybody_waiting)
    leader.commit(groups[0], NEXT)
    assert leader.matchmaker.anybody_waiting
    first, second = await together(leader.match(), waiting)
    assert first.id == second.id != groups[0].id
    assert (first.join.round, first.join.parent) == (6, NEXT)


async def test_members_that_wait_are_told_when_the_round_passed_without_them(network):
    leader, member = await gather(network, 2)
    waiting = asyncio.ensure_future(member.match())
    await until(lambda: leader.matchmaker.anybody_waiting)
    leader.move(NEXT)
    with pytest.raises(RoundAborted, match="is at round 6") as caught:
        await waiting
    assert caught.value.behind
    assert not leader.matchmaker.anybody_waiting


async def test_an_excluding_leader_is_passed_over(network):
    leader, second, third = await gather(network, 3)
    leader.training = False
    groups = await together(second.match(), third.match())
    assert [names(group) for group in groups] == [{second.peer_id, third.peer_id}] * 2


async def test_an_invitation_is_answered_with_where_this_peer_stands(network):
    one, two = await gather(network, 2)
    cases = [
        ({"parent": PARENT}, True, 0),
        ({"parent": PARENT, "run_id": "f" * 64}, False, 0),
        ({"parent": NEXT, "weight": 101}, True, 1),
        ({"parent": NEXT, "weight": 99}, False, 0),
    ]
    for changes, coming, nudges in cases:
        two.nudges.clear()
        stream = await one.node.open(two.peer_id, INVITE_NAME, "round")
        invite = InviteMessage(**{"run_id": RUN, "round": 5, "weight": 100, "wait_s": 1.0, **changes})
        await stream.send_message(Kind.INVITE, invite)
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        assert (status.coming, status.lineage_id, status.weight) == (coming, PARENT, 100)
        assert len(two.nudges) == nudges
        stream.close()


async def test_a_rejection_is_a_message_of_its_own(network):
    leader, member = await gather(network, 2)
    leader.training = False
    stream = await member.hand_in(leader, join_of(member.node.identity)[0])
    reject = await asyncio.wait_for(stream.receive_message(Kind.REJECT, RejectMessage), 5.0)
    assert (reject.reason, reject.round, reject.lineage_id) == ("excluded", 5, PARENT)
    stream.close()
