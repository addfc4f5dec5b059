"""Leaders that answer, and never lead: each costs little, and the others find one another without it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json, seal
from peer.protocol.wire import MAX_JOIN_BYTES, MAX_MESSAGE_BYTES, Kind, RejectMessage, StatusMessage
from peer.swarm import joining, leading
from peer.swarm.roster import JOIN_DOMAIN, RosterMessage
from peer.swarm.streams import StreamClosedError
from tests.swarm.gathering import JOIN_NAME, PARENT, gather, join_of, names, rank, together

pytestmark = pytest.mark.usefixtures("brisk")


async def liars_and_honest(network, answer, **settings):
    """One that outranks two others and does `answer(stream)` to whoever joins; -> (it, the two)."""
    liar, *honest = await gather(network, 3, **settings)
    liar.training = False  # it invites nobody, and comes to nobody

    async def on_join(stream):
        with contextlib.suppress(StreamClosedError):
            await stream.receive({Kind.JOIN: 4096})
            await answer(stream, liar)
            await stream.finish()

    await liar.node.serve(JOIN_NAME, "round", on_join)
    return liar, honest


def outranking(peer_id):
    """A made-up peer that would lead in its place."""
    while rank(name := Identity.generate().peer_id) >= rank(peer_id):
        pass
    return name


@pytest.mark.parametrize("named", ["nobody", "somebody made up", "no peer id"])
async def test_who_sends_everybody_away_is_passed_over(network, monkeypatch, named):
    monkeypatch.setattr(joining, "SENT_AWAY", 5)
    unreachable = iter(f"0OIl{number}" for number in range(10**6))

    async def sends_away(stream, liar):
        name = None
        if named == "somebody made up":
            name = outranking(liar.peer_id)
        elif named == "no peer id":
            name = next(name for name in unreachable if rank(name) < rank(liar.peer_id))
        await stream.send_message(Kind.REJECT, RejectMessage(reason="follow", leader=name, round=5, lineage_id=PARENT))

    _, honest = await liars_and_honest(network, sends_away)
    groups = await asyncio.wait_for(together(*(one.match() for one in honest)), 10.0)
    assert [names(group) for group in groups] == [{one.peer_id for one in honest}] * 2


async def test_a_leader_that_has_sent_away_often_and_led_since_is_asked_again(network):
    leader, member = await gather(network, 2)
    member.matchmaker._joining._sent_away[leader.peer_id] = joining.SENT_AWAY
    groups = await together(leader.match(), member.match())
    assert [len(names(group)) for group in groups] == [2, 2]
    assert leader.peer_id not in member.matchmaker._joining._sent_away


async def test_leaders_that_send_away_are_not_remembered_without_end(network, monkeypatch):
    monkeypatch.setattr(joining, "MAX_SENT_AWAY", 3)
    (member,) = await gather(network, 1)
    for number in range(10):
        await member.matchmaker._joining._ask_again(f"leader {number}")
        assert 0 < len(member.matchmaker._joining._sent_away) <= 3


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.REJECT, Kind.ROSTER])
async def test_who_talks_nonsense_is_not_followed_again(network, kind):
    """It would do so in the next attempt, and in each after that."""

    async def nonsense(stream, _):
        await stream.send(kind, b"{}")

    liar, honest = await liars_and_honest(network, nonsense)
    failed = await together(*(one.match() for one in honest))
    assert {type(failure) for failure in failed} == {RoundAborted}
    assert {failure.culprit for failure in failed} == {liar.peer_id}
    groups = await together(*(one.match() for one in honest))
    assert [names(group) for group in groups] == [{one.peer_id for one in honest}] * 2


def awake_for_ever(left):
    """A leader that says that it is awake, once in a while, and no more; `left`: set when a member has had enough."""

    async def awake(stream, liar):
        message = StatusMessage(coming=True, round=5, lineage_id=PARENT, weight=100, leader=liar.peer_id)
        ended = asyncio.ensure_future(stream.closed())
        while not ended.done():
            await stream.send_message(Kind.STATUS, message)
            await asyncio.wait({ended}, timeout=0.05)
        left.set()

    return awake


async def test_who_stays_awake_and_forms_no_group_is_left_to_who_likes_to_wait(network, monkeypatch):
    monkeypatch.setattr(leading, "SOLO_PATIENCE_S", 0.1)
    liar, honest = await liars_and_honest(network, awake_for_ever(asyncio.Event()), wait=0.1)
    groups = await together(*(one.match() for one in honest))
    assert [names(group) for group in groups] == [{one.peer_id for one in honest}] * 2
    for one in honest:
        view = one.matchmaker.view
        view._gone.clear()
        view.knock(liar.peer_id)
        assert liar.peer_id not in view.expected()  # it may not hold up the next round as well


async def test_who_stays_awake_and_forms_no_group_may_yet_if_there_is_nobody_else(network, monkeypatch):
    """It waits for a third one, or so it may be."""
    monkeypatch.setattr(leading, "SOLO_PATIENCE_S", 0.1)
    left = asyncio.Event()
    liar, (one, _other) = await liars_and_honest(network, awake_for_ever(left), wait=0.1)
    one.directory.peers = {liar.peer_id: liar.record()}
    with pytest.raises(RoundAborted):
        await one.match()
    assert left.is_set()
    assert liar.peer_id not in one.matchmaker.view._disbelieved


def test_64_joins_are_a_message_whoever_made_them():
    largest = {"round": 2**53 - 1, "tokens": 2**40 - 1, "group": "c" * 64, "nonce": "f" * 32}
    sealed, _ = join_of(Identity.generate(), **largest)
    assert len(sealed) <= MAX_JOIN_BYTES
    assert len(RosterMessage(joins=("f" * 2 * MAX_JOIN_BYTES,) * 64).model_dump_json()) <= MAX_MESSAGE_BYTES


async def test_a_padded_join_gets_no_seat(network):
    """64 of them would be more than a roster may be."""
    leader, padded = await gather(network, 2)
    plain = dump_json(join_of(padded.node.identity)[1])
    sealed = seal(padded.node.identity, JOIN_DOMAIN, b" " * MAX_JOIN_BYTES + plain)
    leader.matchmaker._rosters.open_join(sealed, padded.peer_id, leader.position)  # there is nothing else wrong with it
    stream = await padded.hand_in(leader, sealed)
    await asyncio.wait_for(stream.closed(), 5.0)
    assert not leader.matchmaker.anybody_waiting
