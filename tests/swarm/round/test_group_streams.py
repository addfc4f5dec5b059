from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.records import dump_json
from peer.protocol.wire import AbortMessage, HelloMessage, Kind
from peer.swarm.round import group_streams as hellos_module
from peer.swarm.round.giving_up import no_roster
from tests.swarm.gathering import until
from tests.swarm.table import NAME, Table, other_digest


class Ended:
    """A group that has ended, as far as its streams know it."""

    def __init__(self, identifier, members):
        self.identifier, self.members = identifier, members



async def test_who_declines_ends_the_round_of_those_who_have_begun_at_once(network):
    table = Table(network, 3, timeout_s=60.0)
    for exchange in table.exchanges:
        await exchange.start()
    begun = [asyncio.ensure_future(table.exchange(index)) for index in (1, 2)]
    abort = RoundAborted("match", "somebody left while the roster was sent", table.nodes[2].peer_id)
    table.exchanges[0].group_streams.decline(table.groups[0], abort)
    for work in begun:
        with pytest.raises(RoundAborted, match="gave up: somebody left while the roster was sent") as caught:
            await asyncio.wait_for(work, 20.0)
        assert caught.value.culprit == table.nodes[2].peer_id


async def test_who_declines_is_not_held_up_by_members_that_are_gone(network, caplog):
    table = Table(network, 3)
    for index in (1, 2):
        network.cut(table.nodes[index].peer_id)
    table.exchanges[0].group_streams.decline(table.groups[0], RoundAborted("match", "no"))
    await until(lambda: not table.nodes[0]._tasks)
    assert "Traceback" not in caplog.text


async def test_streams_for_a_declined_group_wait_for_nothing(network, caplog):
    table = Table(network, 3)
    await table.exchanges[0].start()
    before = [await table.speak(index, 0) for index in (1, 2)]
    group_streams = table.exchanges[0].group_streams
    await until(lambda: group_streams._early[False].held() == 2)
    group_streams.decline(table.groups[0], RoundAborted("match", "somebody left"))
    after = [await table.speak(index, 0) for index in (1, 2, 1, 2)]
    await until(lambda: group_streams._early[False].held() == 0)
    for stream in (*before, *after):
        stream.close()
    await until(lambda: not group_streams._early[False].held())
    assert "not expected" not in caplog.text
    assert "streams wait" not in caplog.text


async def test_who_comes_to_a_group_that_has_ended_is_told_at_once(network, caplog):
    """Its machine slept with the roster before it; the others gave that round up, and have made others since."""
    table = Table(network, 3, timeout_s=60.0)
    awake, asleep = (1, 2), 0
    for index in awake:
        await table.exchanges[index].start()
    for work in [asyncio.ensure_future(table.exchange(index)) for index in awake]:
        with pytest.raises(RoundAborted) as caught:
            await asyncio.wait_for(work, 20.0)
        assert caught.value.culprit == table.nodes[asleep].peer_id
    for index in awake:
        await table.exchanges[index].release(table.groups[index], caught.value)
    await table.exchanges[asleep].start()
    with pytest.raises(RoundAborted, match=r"gave up: .*cannot be reached"):
        await asyncio.wait_for(table.exchange(asleep), 10.0)
    assert "not expected" not in caplog.text


async def test_a_member_is_told_once_that_its_group_has_ended_and_nobody_else_is(network, monkeypatch, caplog):
    network.retime(first_frame_s=0.2, late_roster_s=0.2)
    table, outsider = Table(network, 2), network.node()
    await table.exchanges[0].start()
    group_streams, told = table.exchanges[0].group_streams, []

    async def decline(peer_id, group_id, abort):
        told.append((peer_id, group_id, abort.reason))

    monkeypatch.setattr(group_streams, "say", decline)
    identifier = table.groups[0].id
    ended = RoundAborted("match", "the group has ended")
    group_streams.ended(Ended(identifier, {node.peer_id for node in table.nodes}), ended)
    for node in (table.nodes[1], outsider, table.nodes[1]):
        stream = await node.open(table.nodes[0].peer_id, NAME, "round")
        await stream.send_message(Kind.HELLO, HelloMessage(group_id=identifier))
        await asyncio.wait_for(stream.closed(), 5.0)
    assert [one for one in told if one[2] == "the group has ended"] == [
        (table.nodes[1].peer_id, identifier, "the group has ended")
    ]
    no_roster = "no roster of this group came"  # to others, once
    assert told[1:] == [(node.peer_id, identifier, no_roster) for node in (outsider, table.nodes[1])]
    assert caplog.text.count("which it is not expected in") == 2
    for number in range(hellos_module.ENDED_KEPT):
        group_streams.ended(Ended(str(number), ()), ended)
    assert len(group_streams._ended) == hellos_module.ENDED_KEPT
    assert identifier not in group_streams._ended


async def test_a_member_that_has_the_roster_may_begin_later_than_the_others(network):
    network.retime(first_frame_s=5.0, late_roster_s=0.05)
    table, waited = Table(network, 2), []
    await table.exchanges[0].start()
    await table.exchanges[1].start()
    for known in (False, True):
        if known:
            table.exchanges[0].group_streams.expect(table.groups[0])
        stream = await table.speak(1, 0)
        ending = asyncio.ensure_future(stream.closed())
        await asyncio.wait([ending], timeout=1.0)
        waited.append(not ending.done())
        ending.cancel()
    assert waited == [False, True]


async def test_a_member_of_a_group_that_has_ended_still_says_why_it_gives_up(network):
    network.retime(first_frame_s=0.2, late_roster_s=0.2)
    table, heard = Table(network, 2), []
    await table.exchanges[0].start()
    group = Ended(table.groups[0].id, {node.peer_id for node in table.nodes})
    group.hear = lambda remote, message: heard.append((remote, message.word.lacks, message.word.lacking))
    table.exchanges[0].group_streams.ended(group, RoundAborted("match", "the group has ended"))
    await table.exchanges[1].group_streams.say(table.nodes[0].peer_id, group.identifier, no_roster("x"))
    await until(lambda: heard)
    assert heard == [(table.nodes[1].peer_id, "roster", ("x",))]


async def test_an_abort_of_a_stranger_to_the_group_means_nothing(network, caplog):
    network.retime(first_frame_s=0.5, late_roster_s=0.5)
    table, outsider = Table(network, 2), network.node()
    for exchange in table.exchanges:
        await exchange.start()
    work = asyncio.ensure_future(table.all())
    abort = dump_json(AbortMessage(reason="no", culprit=table.nodes[0].peer_id))
    for identifier in (table.groups[0].id, other_digest("another group")):
        stream = await outsider.open(table.nodes[1].peer_id, NAME, "round")
        await stream.send_message(Kind.HELLO, HelloMessage(group_id=identifier))
        await stream.send(Kind.ABORT, abort)
        await asyncio.wait({asyncio.ensure_future(stream.closed())}, timeout=5.0)
    one, two = await work
    assert one.update.payload == two.update.payload
    assert caplog.text.count("which it is not expected in") == 2


async def test_streams_for_unknown_groups_are_limited(network, monkeypatch, caplog):
    monkeypatch.setattr(hellos_module, "EARLY_STREAMS", 2)
    network.retime(first_frame_s=0.2, late_roster_s=0.2)
    table = Table(network, 2)
    await table.exchanges[0].start()
    streams = [await table.speak(1, 0) for _ in range(3)]
    await asyncio.gather(*(asyncio.wait_for(stream.closed(), 5.0) for stream in streams), return_exceptions=True)
    assert caplog.text.count("unknown groups: 2 of 2 places are taken") == 1


async def test_streams_for_unknown_groups_are_limited_for_each_peer(network, monkeypatch, caplog):
    network.retime(first_frame_s=0.5, late_roster_s=0.5)
    monkeypatch.setattr(hellos_module, "EARLY_STREAMS", 4)
    table = Table(network, 3)
    for exchange in table.exchanges:
        await exchange.start()
    outsider = network.node()
    for _ in range(6):
        stream = await outsider.open(table.nodes[0].peer_id, NAME, "round")
        await stream.send_message(Kind.HELLO, HelloMessage(group_id=other_digest("none")))
    await until(lambda: "streams wait for unknown groups" in caplog.text)  # the outsider's share is full
    late = [asyncio.ensure_future(table.exchange(index)) for index in (1, 2)]
    await until(lambda: all(table.nodes[0].peer_id in e._group.outbound for e in table.exchanges[1:] if e._group)
                and all(e._group for e in table.exchanges[1:]))  # theirs come before the first has its roster
    updates = [await table.exchange(0), *[await task for task in late]]
    assert len({outcome.update.payload for outcome in updates}) == 1
    assert "streams wait for unknown groups" in caplog.text


async def test_strangers_that_speak_for_made_up_groups_take_a_bounded_place(network, monkeypatch):
    table = Table(network, 2)
    group_streams, told = table.exchanges[0].group_streams, []

    async def decline(peer_id, group_id, _):
        told.append((peer_id, group_id))

    monkeypatch.setattr(group_streams, "say", decline)
    for number in range(hellos_module.TOLD_KEPT + 10):
        for _ in range(2):
            await group_streams._say_unknown("made up", f"stranger {number}")
    assert len(told) == hellos_module.TOLD_KEPT + 10  # each once
    assert len(group_streams._told) == hellos_module.TOLD_KEPT


async def test_a_crowd_of_strangers_that_comes_early_leaves_a_place_for_each_newcomer(network):
    network.retime(first_frame_s=0.5, late_roster_s=0.5)
    table = Table(network, 3)
    for exchange in table.exchanges:
        await exchange.start()
    table.nodes[0].strange = lambda peer_id: peer_id != table.nodes[1].peer_id  # the third has just come
    for _ in range(64):
        stranger = network.node()
        for _ in range(2):
            stream = await stranger.open(table.nodes[0].peer_id, NAME, "round")
            await stream.send_message(Kind.HELLO, HelloMessage(group_id=other_digest("none")))
    late = [asyncio.ensure_future(table.exchange(index)) for index in (1, 2)]
    await until(lambda: all(e._group and table.nodes[0].peer_id in e._group.outbound for e in table.exchanges[1:]))
    updates = [await table.exchange(0), *[await task for task in late]]
    assert len({outcome.update.payload for outcome in updates}) == 1
