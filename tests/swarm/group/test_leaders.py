"""Members at a leader: one that sleeps, says nothing, sends them away, or that they have only heard of."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.wire import Kind, RejectMessage, StatusMessage
from peer.swarm.group import follower
from peer.swarm.net.stream import StreamClosedError, StreamTimeoutError
from peer.swarm.runtime.tasks import cancel_and_wait
from tests.swarm.gathering import INVITE_NAME, JOIN_NAME, NEXT, PARENT, gather, join_of, names, together, until
from tests.swarm.virtual_time import now

pytestmark = pytest.mark.usefixtures("brisk")


@pytest.mark.parametrize("since", ["before", "while they wait"])
async def test_nobody_waits_at_a_leader_that_sleeps(network, since):
    """Its machine takes streams as before; a group would be waited for for 30 s and more."""
    asleep, first, second = await gather(network, 3)
    for_ever = asyncio.Event()
    awake = StatusMessage(coming=True, round=5, lineage_id=PARENT, weight=100, leader=asleep.peer_id)

    async def silence(stream):
        if since != "before":
            await stream.receive(dict.fromkeys((Kind.JOIN, Kind.INVITE), 4096))
            await stream.send_message(Kind.STATUS, awake)
        await for_ever.wait()

    for name in (JOIN_NAME, INVITE_NAME):
        await asleep.node.serve(name, "round", silence)
    groups = await together(first.match(), second.match())
    assert {member.peer_id for member in groups[0].members} == {first.peer_id, second.peer_id}
    for_ever.set()


async def test_a_leader_that_waits_says_that_it_is_awake_until_it_has_a_group(network):
    network.retime(awake_period_s=0.05)
    network.retime(probe_timeout_s=0.5)
    leader, member = await gather(network, 2)
    following = asyncio.ensure_future(member.match())
    await until(lambda: member.peer_id in leader.matchmaker._lobby)
    stream = leader.matchmaker._lobby._taken[member.peer_id].stream
    mark = stream.traffic.sent
    await asyncio.wait({following}, timeout=1.0)  # twice as long as it would wait for a silent one
    assert not following.done()
    assert stream.traffic.sent > mark
    groups = await together(following, leader.match())
    assert {len(group.members) for group in groups} == {2}


async def test_a_member_that_reads_nothing_costs_its_leader_one_round_and_no_more(network, monkeypatch):
    """The leader is in the middle of telling it something when the group forms."""
    leader, deaf = await gather(network, 2, wait=0.3)
    stream = await deaf.hand_in(leader, join_of(deaf.node.identity)[0])
    await until(lambda: deaf.peer_id in leader.matchmaker._lobby)
    monkeypatch.setattr(leader.matchmaker._lobby._taken[deaf.peer_id].stream, "sending", True)
    with pytest.raises(RoundAborted, match="left while the roster was sent") as caught:
        await leader.match()
    assert caught.value.culprit == deaf.peer_id
    stream.close()


@pytest.mark.parametrize("level", [True, False])
async def test_a_leader_that_is_named_is_believed_level_only_by_who_is(network, level):
    first, second, third = await gather(network, 3)
    third.directory.peers[first.peer_id] = first.record(lineage_id="c" * 64)  # as the directory has heard before
    reject = RejectMessage(reason="follow", leader=first.peer_id, round=5, lineage_id=PARENT if level else NEXT)
    await third.matchmaker._follower._heed(reject, second.peer_id, now())
    assert (first.peer_id == third.matchmaker.membership.leader()) == level


async def test_nobody_waits_for_the_directory_to_follow_a_leader_that_it_shows(network):
    """Where one of the DHT's nodes sleeps it is read for seconds."""
    first, second, third = await gather(network, 3)
    read = []

    async def refresh():
        read.append(True)

    third.directory.refresh = refresh
    reject = RejectMessage(reason="follow", leader=first.peer_id, round=5, lineage_id=PARENT)
    await third.matchmaker._follower._heed(reject, second.peer_id, now())
    assert read == []
    assert third.matchmaker.membership.leader() == first.peer_id


async def test_a_leader_that_nobody_else_has_spoken_of_is_followed_at_once_but_not_one_after_another(network):
    first, second, third = await gather(network, 3)
    third.directory.peers = {second.peer_id: second.record()}
    reading, may_end = asyncio.Event(), asyncio.Event()

    async def refresh():
        reading.set()
        await may_end.wait()

    third.directory.refresh = refresh
    reject = RejectMessage(reason="follow", leader=first.peer_id, round=5, lineage_id=PARENT)
    await asyncio.wait_for(third.matchmaker._follower._heed(reject, second.peer_id, now()), 5.0)
    assert third.matchmaker.membership.leader() == first.peer_id
    await asyncio.wait_for(reading.wait(), 5.0)  # beside that
    third.matchmaker.membership.avoid(first.peer_id)  # it was not there
    waiting = asyncio.ensure_future(third.matchmaker._follower._heed(reject, second.peer_id, now()))
    third.matchmaker.membership.company = ()
    await asyncio.wait({waiting}, timeout=0.1)
    assert not waiting.done()
    may_end.set()
    await asyncio.wait_for(waiting, 5.0)


async def test_nobody_waits_long_at_a_silent_leader_when_another_one_invites(network):
    """That one has waited for it before."""
    network.retime(leader_silent_s=0.05)
    network.retime(probe_timeout_s=20.0)
    asleep, second, third = await gather(network, 3)
    called, for_ever = asyncio.Event(), asyncio.Event()

    async def silence(_):
        called.set()
        await for_ever.wait()

    await asleep.node.serve(JOIN_NAME, "round", silence)
    waiting = asyncio.ensure_future(third.match())
    await asyncio.wait_for(called.wait(), 5.0)
    third.directory.fresh = False  # this changes nothing: who invites is where this peer is
    second.matchmaker.membership.avoid(asleep.peer_id)
    groups = await asyncio.wait_for(together(second.match(), waiting), 10.0)
    assert [names(group) for group in groups] == [{second.peer_id, third.peer_id}] * 2
    for_ever.set()


async def test_an_invitation_from_another_calls_nobody_away_from_a_leader_that_is_awake(network):
    network.retime(leader_silent_s=0.05)
    leader, second, third = await gather(network, 3)
    waiting = asyncio.ensure_future(third.match())
    await until(lambda: third.peer_id in leader.matchmaker._lobby)
    inviting = asyncio.ensure_future(second.matchmaker._invites.send(third.peer_id, 1.0))
    await until(lambda: third.matchmaker._invites._inviters)
    await asyncio.wait({waiting}, timeout=0.3)
    assert third.peer_id in leader.matchmaker._lobby
    await cancel_and_wait([inviting])
    await until(lambda: not third.matchmaker._invites._inviters)
    groups = await together(leader.match(), second.match(), waiting)
    assert {len(group.members) for group in groups} == {3}


async def test_a_leader_that_names_one_that_cannot_lead_there_is_passed_over(network):
    """Else it could send everybody away for ever."""
    first, second, third = await gather(network, 3)

    async def sends_away(stream):
        await stream.receive({Kind.JOIN: 4096})
        reject = RejectMessage(reason="follow", leader=second.peer_id, round=5, lineage_id=PARENT)
        await stream.send_message(Kind.REJECT, reject)
        await stream.finish(5.0)

    await first.node.serve(JOIN_NAME, "round", sends_away)
    first.training = False
    groups = await together(second.match(), third.match())
    assert [names(group) for group in groups] == [{second.peer_id, third.peer_id}] * 2


async def test_who_has_waited_at_a_silent_leader_leaves_the_others_time_to_come(network):
    """They waited there as well, for longer than the window: whoever is first would make the round without them."""
    (leader,) = await gather(network, 1, wait=30.0)
    opened = leader.matchmaker._leader._opened  # 30 s before it closes
    assert opened(100.0, 100.0) == 100.0
    assert opened(100.0, 110.0) == 100.0
    assert opened(100.0, 140.0) == 117.5


async def test_a_leader_whose_window_ended_at_another_one_waits_for_who_is_on_its_way(network):
    leader, second, third = await gather(network, 3, wait=30.0)
    join, sealed = leader.matchmaker._rosters.join(leader.position, 100)
    long_ago = leader.node.clock() - 100.0
    leading = asyncio.ensure_future(leader.matchmaker._leader.lead(sealed, join, long_ago))
    waiting = asyncio.ensure_future(second.match())
    await until(lambda: second.peer_id in leader.matchmaker._lobby)
    await asyncio.wait({leading}, timeout=0.6)  # it looks around every quarter of a second
    assert not leading.done()
    groups = await together(leading, waiting, third.match())
    assert [len(names(group)) for group in groups] == [3, 3, 3]


@pytest.mark.parametrize("gone", ["asleep", "dead"])
async def test_who_wakes_where_the_leader_is_gone_looks_around_before_it_waits_for_anybody_else(
    network, gone
):
    """The others have gone on meanwhile: it would lead whoever sleeps as well."""
    network.retime(probe_timeout_s=0.1)
    asleep, member = await gather(network, 2)
    for_ever = asyncio.Event()

    async def silence(_):
        await for_ever.wait()

    await asleep.node.serve(JOIN_NAME, "round", silence)
    if gone == "dead":
        network.cut(asleep.peer_id)
    member.directory.fresh = False
    with pytest.raises(RoundAborted, match="this machine was suspended") as caught:
        await member.match()
    assert (caught.value.instead, caught.value.alone) == ("retry", False)
    for_ever.set()


async def test_who_is_sent_to_another_leader_goes_there_whatever_it_has_heard_of_late(network):
    first, second, third = await gather(network, 3)
    for each in (second, third):
        each.directory.fresh = False
    third.directory.later = {first.peer_id: third.directory.peers.pop(first.peer_id)}
    groups = await together(third.match(), second.match(), first.match())
    assert {len(group.members) for group in groups} == {3}


async def test_a_member_whose_own_machine_slept_waits_on_for_its_leader():
    """Its timer is overdue as it wakes, and what the leader has sent meanwhile is not read yet."""
    said, slept_s = asyncio.Event(), 0.0

    async def receive(_):
        await said.wait()
        return Kind.STATUS, b""

    stream = SimpleNamespace(receive=receive, remote="leader")
    waiting = asyncio.ensure_future(follower._frame(stream, {}, 0.1, lambda: now() + slept_s))
    await asyncio.sleep(0)
    slept_s = 100.0
    await asyncio.wait({waiting}, timeout=0.15)
    assert not waiting.done()
    said.set()
    assert await waiting == (Kind.STATUS, b"")
    said.clear()
    with pytest.raises(StreamTimeoutError, match="sent nothing for"):
        await follower._frame(stream, {}, 0.1, now)


async def test_nobody_listens_for_ever_to_a_leader_that_is_awake(network):
    leader, member = await gather(network, 2)
    awake = StatusMessage(coming=True, round=5, lineage_id=PARENT, weight=100, leader=leader.peer_id)

    async def chatter(stream):
        with contextlib.suppress(StreamClosedError):
            while True:
                await stream.send_message(Kind.STATUS, awake)

    await leader.node.serve(JOIN_NAME, "round", chatter)
    with pytest.raises(RoundAborted, match=r"\d+ times that it is awake, and nothing else") as caught:
        await member.match()
    assert caught.value.culprit == leader.peer_id


async def test_a_member_follows_to_a_leader_that_it_had_not_heard_of(network):
    first, second, third = await gather(network, 3)
    third.directory.later = {first.peer_id: third.directory.peers.pop(first.peer_id)}
    groups = await together(third.match(), second.match(), first.match())
    assert {len(group.members) for group in groups} == {3}


@pytest.mark.parametrize("due", [True, False])
async def test_whoever_sits_at_a_peer_that_hears_of_another_leader_is_sent_there(network, due):
    """The window is 30 s: it would wait there for as long, and the others at their leader for it."""
    network.retime(awake_period_s=60.0 if due else 0.05)
    first, second, third = await gather(network, 3)
    unheard = [each.directory.peers.pop(first.peer_id) for each in (second, third)]
    waiting = asyncio.ensure_future(third.match())
    await until(lambda: third.peer_id in second.matchmaker._lobby)
    for each, record in zip((second, third), unheard, strict=True):
        each.directory.peers[first.peer_id] = record
    if due:
        groups = await asyncio.wait_for(together(first.match(), second.match(), waiting), 10.0)
        assert [len(names(group)) for group in groups] == [3, 3, 3]
    else:
        await until(lambda: third.peer_id in first.matchmaker._lobby)
        assert not second.matchmaker.anybody_waiting
        await cancel_and_wait([waiting])
