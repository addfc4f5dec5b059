"""Leaders that answer, and never lead: each costs little, and the others find one another without it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from peer.outer.round import Due, RoundAborted
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json, seal
from peer.protocol.wire import MAX_JOIN_BYTES, MAX_ROSTER_BYTES, Kind, RejectMessage, StatusMessage
from peer.swarm.group import follower
from peer.swarm.group.roster import JOIN_DOMAIN, RosterMessage
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.gathering import JOIN_NAME, PARENT, gather, join_of, names, rank, together
from tests.swarm.virtual_time import now

pytestmark = pytest.mark.usefixtures("brisk")


async def byzantine_and_honest(network, answer, count=3, **settings):
    """One that outranks all others and does `answer(stream, it)` to whoever joins; -> (it, the others)."""
    byzantine, *honest = await gather(network, count, **settings)
    byzantine.training = False  # it invites no peer, and joins none

    async def on_join(stream):
        with contextlib.suppress(StreamClosedError):
            await stream.receive({Kind.JOIN: 4096})
            await answer(stream, byzantine)
            await stream.finish(5.0)

    await byzantine.node.serve(JOIN_NAME, "round", on_join)
    return byzantine, honest


def outranking(peer_id):
    """A made-up peer that would lead in its place."""
    while rank(name := Identity.generate().peer_id) >= rank(peer_id):
        pass
    return name


@pytest.mark.parametrize("named", ["nobody", "somebody made up", "no peer id"])
async def test_who_sends_everybody_away_is_passed_over(network, named):
    network.retime(sent_away_s=0.2)
    unreachable = iter(f"0OIl{number}" for number in range(10**6))

    async def sends_away(stream, byzantine):
        name = None
        if named == "somebody made up":
            name = outranking(byzantine.peer_id)
        elif named == "no peer id":
            name = next(name for name in unreachable if rank(name) < rank(byzantine.peer_id))
        await stream.send_message(Kind.REJECT, RejectMessage(reason="follow", leader=name, round=5, lineage_id=PARENT))

    _, honest = await byzantine_and_honest(network, sends_away)
    groups = await asyncio.wait_for(together(*(one.match() for one in honest)), 10.0)
    assert [names(group) for group in groups] == [{one.peer_id for one in honest}] * 2
    assert [one.costs for one in honest] == [[], []]  # an honest leader may name one that is there for it alone


async def test_who_was_in_a_round_since_is_as_good_as_anybody(network, monkeypatch):
    leader, third, member, _ = await gather(network, 4)
    one, seen = member.matchmaker._follower, {}
    monkeypatch.setattr(one._rosters, "_seen", lambda: seen)
    for name in (leader.peer_id, third.peer_id):
        for _ in range(2):
            one._waste(name, now() - STANDARD.wasted_s - 1.0)
    assert all(map(one._membership.disbelieves, (leader.peer_id, third.peer_id)))
    assert one._membership.leader() == member.peer_id
    one.begin()
    assert one._wasted_by(leader.peer_id) > 2 * STANDARD.wasted_s
    seen[leader.peer_id] = 1
    one.begin()
    assert one._wasted_by(leader.peer_id) == 0.0
    assert one._membership.leader() == leader.peer_id
    assert one._membership.disbelieves(third.peer_id)


async def test_leaders_that_waste_time_are_not_remembered_without_end(network, monkeypatch):
    monkeypatch.setattr(follower, "MAX_WASTEFUL", 3)
    (member,) = await gather(network, 1)
    one = member.matchmaker._follower
    for number in range(10):
        one._waste(f"leader {number}", now())
    assert list(one._wasted) == ["leader 7", "leader 8", "leader 9"]


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.REJECT, Kind.ROSTER])
async def test_who_talks_nonsense_is_not_followed_again(network, kind):
    """It would do so in the next attempt, and in each after that."""

    async def nonsense(stream, _):
        await stream.send(kind, b"{}")

    byzantine, honest = await byzantine_and_honest(network, nonsense)
    failed = await together(*(one.match() for one in honest))
    assert {type(failure) for failure in failed} == {RoundAborted}
    assert {failure.culprit for failure in failed} == {byzantine.peer_id}
    groups = await together(*(one.match() for one in honest))
    assert [names(group) for group in groups] == [{one.peer_id for one in honest}] * 2


@pytest.mark.parametrize("then", ["goes on", "hangs up", "is excluded", "is silent", "names one that is gone"])
async def test_who_keeps_members_waiting_and_forms_no_group_is_left_to_who_likes_to_wait(network, then):
    """Members come at different times, and wait there again, while others wait for them elsewhere."""
    network.retime(solo_patience_s=0.2)
    network.retime(probe_timeout_s=0.2)
    network.retime(wasted_s=0.4)
    network.retime(gone_for_s=0.3)

    async def hold(stream, byzantine):
        message = StatusMessage(coming=True, round=5, lineage_id=PARENT, weight=100, leader=byzantine.peer_id)
        held_until = now() + (60.0 if then == "goes on" else 0.8)
        ended = asyncio.ensure_future(stream.closed())
        while not ended.done() and now() < held_until:
            await stream.send_message(Kind.STATUS, message)
            await asyncio.wait({ended}, timeout=0.05)
        if then == "is silent":
            await asyncio.wait({ended}, timeout=5.0)
        elif then in ("is excluded", "names one that is gone") and not ended.done():
            named = outranking(byzantine.peer_id) if then != "is excluded" else None
            reason = "follow" if named else "excluded"
            await stream.send_message(
                Kind.REJECT, RejectMessage(reason=reason, leader=named, round=5, lineage_id=PARENT)
            )
        await cancel_and_wait([ended])

    byzantine, honest = await byzantine_and_honest(network, hold, count=4, wait=0.7)
    grouped = asyncio.Event()

    async def train(one, late_s):
        await asyncio.sleep(late_s)
        while not grouped.is_set():
            try:
                group = await one.matchmaker.match(Due(1, 100, torch.empty(0)))
            except RoundAborted:
                await asyncio.sleep(0.05)
                continue
            if len(names(group)) == len(honest):
                grouped.set()
            one.matchmaker.included(group)

    training = [asyncio.ensure_future(train(one, 0.3 * number)) for number, one in enumerate(honest)]
    try:
        await asyncio.wait_for(grouped.wait(), 20.0)
    finally:
        await cancel_and_wait(training)
    assert byzantine.peer_id in {leader for one in honest for leader in one.matchmaker._follower._wasted}


async def test_an_invitation_of_whom_nobody_believes_holds_it_up_for_nobody(network):
    """It would wait for who says that it comes."""
    leader, member = await gather(network, 2)
    member.matchmaker.membership.disbelieve(leader.peer_id, 60.0)
    await asyncio.wait_for(leader.matchmaker._invites.send(member.peer_id, 30.0), 5.0)
    assert not member.hurried.is_set()


async def test_a_leader_is_not_left_alone_if_there_is_nobody_else(network):
    """It waits for a third one, or so it may be; or nobody else can be reached."""
    leader, one, *clients = await gather(network, 4, clients=(2, 3))
    for client in clients:
        assert client.matchmaker._follower._membership.others_than(leader.peer_id) == 1
    assert one.matchmaker.membership.others_than(leader.peer_id) == 1  # only one of the clients, which reach no other
    for number, member in enumerate((one, clients[0])):
        member.directory.peers = {leader.peer_id: leader.record(), clients[1].peer_id: clients[1].record()}
        waste = member.matchmaker._follower._waste
        for _ in range(2):
            waste(leader.peer_id, now() - STANDARD.wasted_s - 1.0)
        assert member.matchmaker.membership.disbelieves(leader.peer_id) == (number == 0)


def test_64_joins_are_a_message_whoever_made_them():
    largest = {"round": 2**53 - 1, "tokens": 2**40 - 1, "group": "c" * 64, "nonce": "f" * 32, "work": 2**53 - 1}
    largest |= {"speed": 2**53 - 1, "up": 2**53 - 1, "seen": "_" * 64}
    sealed, _ = join_of(Identity.generate(), **largest)
    assert len(sealed) <= MAX_JOIN_BYTES
    assert len(RosterMessage(joins=("f" * 2 * MAX_JOIN_BYTES,) * 64).model_dump_json()) <= MAX_ROSTER_BYTES


async def test_a_padded_join_gets_no_seat(network):
    """64 of them would be more than a roster may be."""
    leader, padded = await gather(network, 2)
    plain = dump_json(join_of(padded.node.identity)[1])
    sealed = seal(padded.node.identity, JOIN_DOMAIN, b" " * MAX_JOIN_BYTES + plain)
    leader.matchmaker._rosters.open_join(sealed, padded.peer_id, leader.position)  # there is nothing else wrong with it
    stream = await padded.hand_in(leader, sealed)
    await asyncio.wait_for(stream.closed(), 5.0)
    assert not leader.matchmaker.anybody_waiting


async def test_identities_in_probation_lead_none_that_have_taken_part(network):
    """An attacker that makes enough keys owns the lowest hash."""
    lowest, second, *_ = members = await gather(network, 4)
    for member in members:
        member.newcomers = frozenset({lowest.peer_id})
    assert {member.matchmaker.membership.leader() for member in members} == {second.peer_id}
    for member in members:
        member.newcomers = frozenset(each.peer_id for each in members)
    assert {member.matchmaker.membership.leader() for member in members} == {lowest.peer_id}


@pytest.mark.parametrize("lineage_id", [PARENT, "f" * 64])
async def test_who_says_behind_without_a_heavier_lineage_is_asked_no_more_for_a_while(network, lineage_id):
    """To look for the round that it claims would take seconds."""

    async def claims(stream, _):
        await stream.send_message(
            Kind.REJECT, RejectMessage(reason="behind", leader=None, round=5, lineage_id=lineage_id, weight=7)
        )

    _, honest = await byzantine_and_honest(network, claims)
    groups = await asyncio.wait_for(together(*(one.match() for one in honest)), 10.0)
    assert [names(group) for group in groups] == [{one.peer_id for one in honest}] * 2
    assert [one.nudges for one in honest] == [[], []]


async def test_a_round_does_not_make_a_false_claim_forgotten(network, monkeypatch):
    leader, member, _ = await gather(network, 3)
    one, seen = member.matchmaker._follower, {}
    monkeypatch.setattr(one._rosters, "_seen", lambda: seen)
    one._waste(leader.peer_id, now() - 1.0)
    one._membership.disbelieve(leader.peer_id, STANDARD.unproven_s)
    seen[leader.peer_id] = 1
    one.begin()
    assert one._membership.disbelieves(leader.peer_id)
