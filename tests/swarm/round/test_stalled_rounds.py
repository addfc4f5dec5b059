"""Rounds in which one member stalls: what the others tell each other, and who gets no seat after it."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, AbortMessage, Kind
from peer.protocol.word import SignedWord
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.round.group_words import GroupWords
from tests.swarm.gathering import until
from tests.swarm.stalling import circle_of, failed_round, refused, sends, stalls


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(Kind.CONTRIBUTION, "contribution"), (Kind.SEAL_SENT, "contribution"), (Kind.SEAL_REDUCED, "reduced")],
)
async def test_who_stalls_all_is_refused_by_all_after_its_second_time(network, tmp_path, kind, stage):
    circle = await circle_of(network, tmp_path)
    *honest, liar = circle.seats
    stalls(liar, kind)
    for time in range(2):
        for words in (await failed_round(circle))[:3]:
            for seat in honest:
                assert words[seat.peer_id] == Lack(stage, frozenset({liar.peer_id}))
        for seat in honest:
            assert refused(circle, seat) == ({liar.peer_id} if time else set())
    assert all(seat.guard.stalls.shuns(liar.peer_id) for seat in honest)
    abort = honest[0].guard.objection(seat.peer_id for seat in circle.seats)
    assert (abort.culprit, abort.lack.names) == (liar.peer_id, {liar.peer_id})


async def test_who_stalls_one_member_alone_is_refused_by_that_one(network, tmp_path):
    circle = await circle_of(network, tmp_path)
    victim, *others, liar = circle.seats
    stalls(liar, Kind.CONTRIBUTION, victim.peer_id)
    for _ in range(2):
        await failed_round(circle)
    assert refused(circle, victim) == {liar.peer_id}
    for other in others:  # the chain knows neither
        assert refused(circle, other) == {victim.peer_id, liar.peer_id}


async def test_who_withholds_its_vote_stalls_nobody(network, tmp_path):
    circle = await circle_of(network, tmp_path)
    *honest, liar = circle.seats
    stalls(liar, Kind.VOTE)
    locals_, firsts = circle.locals(), [circle._first(seat) for seat in circle.seats]
    work = [circle.one_round(index, locals_[index], firsts[index]) for index in range(4)]
    outcomes = await asyncio.wait_for(asyncio.gather(*work), 20.0)
    assert len({update.digest() for _, update in outcomes}) == 1
    assert all(refused(circle, seat) == set() for seat in honest)


async def test_who_leaves_in_the_middle_is_named_before_the_deadline(network, tmp_path):
    circle = await circle_of(network, tmp_path)
    *honest, liar = circle.seats
    for seat in circle.seats:
        seat.exchange._budget._cap_s = 60.0
    network.retime(min_exchange_s=60.0, soft_exchange_s=60.0)
    opening = liar.node.open

    async def opened(*arguments, **options):
        stream = await opening(*arguments, **options)
        asyncio.get_running_loop().call_later(0.05, stream.close)
        return stream

    liar.node.open = opened
    stalls(liar, Kind.CONTRIBUTION)
    rounds = 0
    while rounds < 6 and not all(liar.peer_id in seat.guard.stalls._refused for seat in honest):
        await failed_round(circle)
        rounds += 1
    assert rounds >= 2  # where all see it leave; a round that ends by one member's word gives one dispute
    assert all(liar.peer_id in seat.guard.stalls._refused for seat in honest)
    assert not any(seat.guard.stalls.shuns(other.peer_id) for seat in honest for other in honest)


async def test_who_signs_for_another_group_towards_one_member_gets_no_other_refuse_that_one(network, tmp_path):
    circle = await circle_of(network, tmp_path)
    victim, *others, liar = circle.seats

    async def sending(stream, send, kind, body):
        lies = kind is Kind.SEAL_SENT and stream.remote == victim.peer_id
        await send(bytes([bytes(body)[0] ^ 1]) + bytes(body)[1:]) if lies else await send()

    sends(liar, sending)
    for _ in range(3):
        for words in (await failed_round(circle))[:3]:
            assert words[victim.peer_id] == Lack("contribution", frozenset({liar.peer_id}))
    assert refused(circle, victim) == {liar.peer_id}
    for seat in others:
        assert set(seat.guard.stalls._disputes) == {frozenset({victim.peer_id, liar.peer_id})}
        assert not seat.guard.stalls.shuns(victim.peer_id)


async def test_a_word_before_the_deadline_does_not_close_the_books_to_what_is_seen_then(network, tmp_path):
    """Each round the liar withholds from another victim, and leaves the others, which have all that it sends."""
    circle = await circle_of(network, tmp_path)
    network.retime(min_exchange_s=2.0, soft_exchange_s=2.0, stall_words_s=0.6)
    *honest, liar = circle.seats
    victims = list(honest)
    for seat in circle.seats:
        budget = seat.exchange._budget
        budget._cap_s = budget._floor_s = budget._soft_s = 2.0

    async def sending(stream, send, kind, _):
        if kind is Kind.SEAL_SENT and stream.remote == victims[0].peer_id:
            await asyncio.Event().wait()
        await send()
        if kind is Kind.SEAL_REDUCED and stream.remote != victims[0].peer_id:
            await stream.send_message(Kind.ABORT, AbortMessage(reason="r"))
            await asyncio.Event().wait()

    sends(liar, sending)
    while victims:
        victim = victims[0]
        for words in (await failed_round(circle))[:3]:
            assert words[victim.peer_id] == Lack("contribution", frozenset({liar.peer_id}))
        victims.pop(0)
    for seat in honest:
        assert refused(circle, seat) == {liar.peer_id}
        assert seat.guard.stalls.shuns(liar.peer_id)


async def test_who_is_not_ready_for_the_next_round_is_named_by_those_that_waited(network, tmp_path):
    circle = await circle_of(network, tmp_path)
    *honest, liar = circle.seats
    locals_, firsts = circle.locals(), [circle._first(seat) for seat in circle.seats]
    work = [circle.one_round(index, locals_[index], firsts[index]) for index in range(4)]
    await asyncio.wait_for(asyncio.gather(*work), 20.0)
    waits = [asyncio.ensure_future(circle.next_round(index, 0.5)) for index in range(3)]
    for seat, wait in zip(honest, waits, strict=True):
        with pytest.raises(StalledError) as caught:
            await asyncio.wait_for(wait, 10.0)
        assert caught.value.lack == Lack("join", frozenset({liar.peer_id}))
        await seat.exchange.dissolve(caught.value)
    for seat in honest:
        await until(lambda seat=seat: len(seat.guard.stalls._failures[firsts[0].id].lacks) >= 3, 5.0)
        owing = frozenset({liar.peer_id})
        await until(lambda seat=seat, owing=owing: seat.guard.stalls._debts.left_s(owing) > 0.0, 5.0)
        assert all(seat.guard.stalls._debts.left_s(frozenset({other.peer_id})) == 0.0 for other in honest)


def test_what_a_member_lacks_is_told_within_bounds():
    lack = Lack("reduced", frozenset({"b" * 46, "a" * 46}))
    words = GroupWords(Identity.generate(), "a" * 64)
    message = words.message("b" * 64, StalledError(RoundAborted("exchange", "x" * 999), lack))
    assert len(dump_json(message)) < MAX_MESSAGE_BYTES
    assert Lack.said(message.word) == lack
    assert Lack.said(None) is None
    assert Lack.said(SignedWord(lacks="vote", lacking=(), signature="00" * 64)) is None
