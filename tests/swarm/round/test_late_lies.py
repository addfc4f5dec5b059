"""What a member does after half of the deadline, or to one member alone, so that the others blame that one."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import Due, RoundAborted
from peer.protocol.wire import Kind
from peer.swarm.round.giving_up import Lack
from tests.swarm.gathering import until
from tests.swarm.stalling import circle_of, failed_round, refused, sends
from tests.swarm.tampering import TAMPERINGS, Tampering

DEADLINE_S, LATE_S = 3.0, 2.0


def another_group(body):
    return bytes([body[0] ^ 1, *body[1:]])


def wrong_signature(body):
    return bytes([*body[:-1], body[-1] ^ 1])


def huge(body):
    return b"\x7f" * len(body)


@pytest.mark.parametrize(
    ("kind", "spoilt"),
    [(Kind.SEAL_SENT, another_group), (Kind.SEAL_SENT, wrong_signature), (Kind.CONTRIBUTION, huge)],
)
async def test_what_is_of_no_use_to_one_member_late_has_not_come_to_it(network, tmp_path, kind, spoilt):
    circle = await circle_of(network, tmp_path, deadline_s=DEADLINE_S)
    victim, *others, liar = circle.seats

    async def sending(stream, send, what, body):
        if what is kind and stream.remote == victim.peer_id:
            await asyncio.sleep(LATE_S)
            await send(spoilt(bytes(body)))
        else:
            await send()

    sends(liar, sending)
    for _ in range(2):
        for words in (await failed_round(circle))[:3]:
            assert words[victim.peer_id] == Lack("contribution", frozenset({liar.peer_id}))
            assert all(words[seat.peer_id] == Lack("reduced", frozenset({victim.peer_id})) for seat in others)
    assert refused(circle, victim) == {liar.peer_id}
    for seat in others:  # the chain knows neither
        assert refused(circle, seat) == {victim.peer_id, liar.peer_id}
        assert not seat.guard.stalls.shuns(victim.peer_id)


@pytest.mark.parametrize("how", ["signature", "values"])
async def test_a_shard_that_is_of_no_use_comes_late_and_names_its_reducer_alone(network, tmp_path, monkeypatch, how):
    circle = await circle_of(network, tmp_path, deadline_s=DEADLINE_S)
    *honest, liar = circle.seats
    if how == "values":
        monkeypatch.setitem(TAMPERINGS, "huge", lambda mean, _: mean * 0.0 + 2.0**60)
        strategies = liar.exchange._strategies

        def tampered(rounds):
            strategy = strategies(rounds)
            if not isinstance(strategy._aggregator, Tampering):
                strategy._aggregator = Tampering(strategy._aggregator, dict.fromkeys(range(9), "huge"))
            return strategy

        async def held(*arguments):
            await asyncio.sleep(DEADLINE_S)
            await release(*arguments)

        release, liar.exchange.release, liar.exchange._strategies = liar.exchange.release, held, tampered

    async def sending(_, send, what, body):
        if what is Kind.SEAL_REDUCED:
            await asyncio.sleep(LATE_S)
        if what is Kind.SEAL_REDUCED and how == "signature":
            await send(wrong_signature(bytes(body)))
        elif what is not Kind.ABORT:
            await send()

    sends(liar, sending)
    for _ in range(2):
        for words in (await failed_round(circle))[:3]:
            said = [words[seat.peer_id] for seat in honest]
            assert Lack("reduced", frozenset({liar.peer_id})) in said
            if how == "values":  # all find it; a signature is found by one, which tells the others
                assert len(set(said)) == 1
    for seat in honest:
        assert liar.peer_id in refused(circle, seat)
        assert all(liar.peer_id in pair for pair in seat.guard.stalls._disputes)


async def test_who_contributes_late_and_leaves_before_the_others_can_reduce_is_named_alone(network, tmp_path):
    circle = await circle_of(network, tmp_path, deadline_s=DEADLINE_S)
    *honest, liar = circle.seats

    async def sending(stream, send, kind, _):
        if kind is Kind.SEAL_SENT:
            await asyncio.sleep(LATE_S)
        await send()
        if kind is Kind.SEAL_SENT:
            stream.close()

    sends(liar, sending)
    for _ in range(2):
        await failed_round(circle)
    for seat in honest:
        assert all(liar.peer_id in pair for pair in seat.guard.stalls._disputes)
        assert not any(seat.guard.stalls.shuns(other.peer_id) for other in honest)
        assert liar.peer_id in refused(circle, seat)


async def all_round(circle):
    """The first round of all, which is committed."""
    locals_, firsts = circle.locals(), [circle._first(seat) for seat in circle.seats]
    work = [circle.one_round(index, locals_[index], firsts[index]) for index in range(len(circle.seats))]
    await asyncio.wait_for(asyncio.gather(*work), 20.0)
    return firsts[0].id


async def test_who_has_no_join_of_one_member_is_not_to_blame_for_its_contribution(network, tmp_path):
    circle = await circle_of(network, tmp_path)
    victim, *others, liar = circle.seats

    async def sending(stream, send, kind, _):
        if kind is Kind.JOIN and stream.remote == victim.peer_id:
            await asyncio.Event().wait()
        await send()

    sends(liar, sending)
    group = await all_round(circle)
    locals_ = circle.locals()

    async def next_one(index):
        seat = circle.seats[index]
        due = Due(1, seat.tokens, locals_[index])
        try:
            began = await seat.exchange.next_round(due, seat.state, seat.position, 20.0)
        except RoundAborted as abort:
            await seat.exchange.dissolve(abort, tell=True)
            return
        with pytest.raises(RoundAborted) as caught:
            await seat.exchange.exchange(began, due, seat.state)
        await seat.exchange.release(began, caught.value)

    await asyncio.wait_for(asyncio.gather(*map(next_one, range(4))), 20.0)
    await until(lambda: all(seat.guard.stalls._failures[group].settled for seat in circle.seats), 5.0)
    words = others[0].guard.stalls._failures[group].lacks
    assert words[victim.peer_id] == Lack("join", frozenset({liar.peer_id}))
    assert all(words[seat.peer_id] == Lack("contribution", frozenset({victim.peer_id})) for seat in others)
    for seat in others:
        assert set(seat.guard.stalls._disputes) == {frozenset({victim.peer_id, liar.peer_id})}


async def patient_circle(network, folder, sending):
    """A circle that has made its first round; from then on the last one sends by this, and .2 s are late."""
    circle = await circle_of(network, folder)
    network.retime(late_s=0.2, min_exchange_s=5.0, soft_exchange_s=5.0)
    for seat in circle.seats:
        seat.exchange._budget._cap_s = seat.exchange._budget._floor_s = seat.exchange._budget._soft_s = 5.0
        seat.exchange._lateness._least_s = 0.2
    lies = asyncio.Event()

    async def sends_by(stream, send, kind, _):
        if lies.is_set():
            await sending(circle, stream, kind)
        await send()

    sends(circle.seats[-1], sends_by)
    await all_round(circle)
    lies.set()
    for _ in range(3):
        locals_ = circle.locals()
        rounds = (circle.one_round(index, locals_[index], None) for index in range(4))
        await asyncio.wait_for(asyncio.gather(*rounds), 20.0)
    return circle


@pytest.mark.parametrize("how", ["join", "contribution", "and its vote"])
async def test_who_is_late_through_another_is_not_to_blame_for_being_late(network, tmp_path, how):
    async def sending(circle, stream, kind):
        if stream.remote == circle.seats[0].peer_id:
            if kind is (Kind.JOIN if how == "join" else Kind.SEAL_SENT):
                await asyncio.sleep(1.0)
            if kind is Kind.SEAL_REDUCED and how == "and its vote":
                await asyncio.sleep(0.7)

    circle = await patient_circle(network, tmp_path, sending)
    victim, *others, liar = circle.seats
    between = frozenset({victim.peer_id, liar.peer_id})
    for seat in others:
        await until(lambda debts=seat.guard.stalls._debts: debts.left_s(between) > 0.0, 5.0)
        assert not seat.guard.stalls._debts.left_s(frozenset({victim.peer_id}))
