"""One member delays another alone, in ways of which that one's own last words would not tell.

By an attacker who had not written the defence: each of these had all honest members refuse the victim, or cost two
rounds of five.
"""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import Due, RoundAborted, link_of
from peer.protocol.wire import Kind
from peer.swarm.round.giving_up import Lack
from peer.swarm.trust.debts import FACTOR
from tests.swarm.gathering import until
from tests.swarm.stalling import circle_of

PATIENCE_S = 20.0


async def begun(network, folder, deadline_s=1.5, **timings):
    """A circle that has made its first round, and who in it is who."""
    circle = await circle_of(network, folder, deadline_s=deadline_s)
    network.retime(min_exchange_s=deadline_s, soft_exchange_s=deadline_s, late_s=0.3, **timings)
    for seat in circle.seats:
        budget = seat.exchange._budget
        budget._cap_s = budget._floor_s = budget._soft_s = deadline_s
        seat.exchange._lateness._least_s = 0.3
    await circle.round()
    victim, *others, liar = circle.seats
    return circle, victim, others, liar


async def one(circle, index):
    """A member's next round, from its join to what it says when it fails. -> whether it is committed."""
    seat, first = circle.seats[index], None
    due = Due(1, seat.tokens, circle.locals()[index])
    try:
        first = await seat.exchange.next_round(due, seat.state, seat.position, PATIENCE_S)
        exchanged = await seat.exchange.exchange(first, due, seat.state)
        link = await link_of(first, exchanged, seat.state, seat.state.digest())
        certificate = await seat.exchange.commit(first, link)
    except RoundAborted as abort:
        if first is None:
            await seat.exchange.dissolve(abort, tell=True)
        else:
            await seat.exchange.release(first, abort)
        return False
    seat.state.apply(exchanged.update, seat.state.round + 1, certificate.link.id)
    await seat.exchange.release(first, None, seat.position)
    return True


async def all_of(circle):
    return await asyncio.wait_for(asyncio.gather(*(one(circle, index) for index in range(len(circle.seats)))), 30.0)


async def are_in_dispute(seats, victim, liar):
    pair = frozenset({victim.peer_id, liar.peer_id})
    for seat in seats:
        book = seat.guard.stalls
        await until(lambda book=book: book._debts.left_s(pair) > 0.0, 10.0)
        assert set(book._disputes) == {pair}
        assert book._debts.left_s(frozenset({victim.peer_id})) == 0.0
        assert not book.refuses(victim.peer_id)


async def test_who_has_joined_one_member_alone_is_the_one_for_whom_all_others_wait(network, tmp_path):
    circle, victim, others, liar = await begun(network, tmp_path)

    async def sending(stream, send, kind, _):
        if kind is Kind.JOIN and stream.remote != victim.peer_id:
            await asyncio.Event().wait()
        await send()

    sends_by(liar, sending)
    group = liar.exchange._group.identifier
    assert await all_of(circle) == [False] * 4
    await until(lambda: all(seat.guard.stalls._failures[group].settled for seat in others), 5.0)
    words = others[0].guard.stalls._failures[group].lacks
    assert words[victim.peer_id] == Lack("contribution", frozenset(seat.peer_id for seat in others))
    waiting = [(words[seat.peer_id].stage, words[seat.peer_id].names) for seat in others]
    assert waiting == [("waiting", {liar.peer_id})] * 2
    for seat in others:  # it says itself that it had begun: so it is in dispute with all
        book = seat.guard.stalls
        assert book._debts.left_s(frozenset({liar.peer_id})) > 0.0
        assert not any(victim.peer_id in peers for peers in book._debts._debts)


async def test_who_signs_another_group_and_is_silent_then_holds_no_words_back(network, tmp_path):
    circle, victim, others, liar = await begun(network, tmp_path, deadline_s=5.0, audit_ask_s=20.0)

    async def sending(stream, send, kind, body):
        lies = kind is Kind.SEAL_SENT and stream.remote == victim.peer_id
        await send(bytes([body[0] ^ 1, *body[1:]])) if lies else await send()

    sends_by(liar, sending)

    async def silent(*_):
        await asyncio.Event().wait()

    liar.node.accept = silent
    assert await asyncio.wait_for(all_of(circle), 4.0) == [False] * 4
    await are_in_dispute(others, victim, liar)


async def test_who_is_late_and_gives_up_says_why_to_members_that_have_committed(network, tmp_path):
    circle, victim, others, liar = await begun(network, tmp_path, deadline_s=3.0)

    async def sending(stream, send, kind, _):
        if stream.remote == victim.peer_id and kind is Kind.SEAL_SENT:
            await asyncio.sleep(1.0)
        if stream.remote == victim.peer_id and kind is Kind.SEAL_REDUCED:
            await asyncio.Event().wait()
        await send()

    sends_by(liar, sending)
    assert (await all_of(circle))[:3] == [False, True, True]
    await are_in_dispute(others, victim, liar)


@pytest.mark.parametrize("training_s", [0.0, 3.0])
async def test_who_joins_late_after_a_shard_that_came_late_to_it_alone_shares_its_cost(network, tmp_path, training_s):
    """The cost of the shard, and not of its own training."""
    circle, victim, others, liar = await begun(network, tmp_path, deadline_s=5.0)

    async def sending(stream, send, kind, _):
        if stream.remote == victim.peer_id and kind is Kind.SEAL_REDUCED:
            await asyncio.sleep(1.5)
        await send()

    sends_by(liar, sending)

    async def at_once(_):
        """It does not wait until its own late frames are sent."""

    liar.exchange._all_sent = at_once

    async def rounds(index):
        for number in range(2):
            if number and circle.seats[index] is victim:
                await asyncio.sleep(training_s)
            await one(circle, index)

    await asyncio.wait_for(asyncio.gather(*map(rounds, range(4))), 30.0)
    await are_in_dispute(others, victim, liar)
    pair = frozenset({victim.peer_id, liar.peer_id})
    assert all(seat.guard.stalls._debts.left_s(pair) < FACTOR * 3.0 for seat in others)


def sends_by(seat, sending):
    """From now on a member sends its frames by this, on the streams that it has: see `sends`."""
    for stream in seat.exchange._group.outbound.values():

        async def changed(kind, body=b"", *rest, stream=stream, send=stream.send, **more):
            await sending(stream, lambda other=body: send(kind, other, *rest, **more), kind, bytes(body))

        stream.send = changed
