"""One member has another left alone while a round begins or ends, so that all others name that one.

By an attacker who had not written the defence: each of these had all honest members refuse the victim, and cost the
liar nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from peer.outer.round import Due, RoundAborted
from peer.protocol.records import dump_json
from peer.protocol.wire import AbortMessage, HelloMessage, Kind
from tests.swarm.gathering import until
from tests.swarm.round.test_delayed import one, sends_by
from tests.swarm.stalling import circle_of

DEADLINE_S = 4.0
COUNTS = pytest.mark.parametrize("count", [3, 4, 8])


async def seated(network, folder, count):
    """A circle after its first round: the victim, the others, the liar."""
    circle = await circle_of(network, folder, count=count, deadline_s=DEADLINE_S)
    network.retime(min_exchange_s=DEADLINE_S, soft_exchange_s=DEADLINE_S, stall_words_s=1.0, late_roster_s=1.0)
    for seat in circle.seats:
        budget = seat.exchange._budget
        budget._cap_s = budget._floor_s = budget._soft_s = DEADLINE_S
    await circle.round()
    victim, *others, liar = circle.seats
    return circle, victim, others, liar


async def until_judged(seats, group):
    await until(lambda: all(seat.guard.stalls._failures[group].settled for seat in seats), 8.0)


def only_these_two(seats, victim, liar):
    pair = frozenset({victim.peer_id, liar.peer_id})
    for seat in seats:
        assert set(seat.guard.stalls._debts._debts) == {pair}


@pytest.mark.parametrize("poisoned", [False, True])
@COUNTS
async def test_a_member_says_that_it_has_no_roster_which_its_leader_owes(network, tmp_path, count, poisoned):
    circle, victim, others, liar = await seated(network, tmp_path, count)
    for seat in circle.seats:
        await seat.exchange.dissolve(RoundAborted("match", "another group forms"))
    circle._joins = None
    firsts = [replace(circle._first(seat), leader=liar.peer_id) for seat in circle.seats]
    if poisoned:  # the liar alone knows the group's id, before it sends the roster to the others
        stream = await liar.node.open(victim.peer_id, liar.exchange.group_streams._name, "round")
        await stream.send_message(Kind.HELLO, HelloMessage(group_id=firsts[0].id))
        await until(lambda: (firsts[0].id, liar.peer_id) in victim.exchange.group_streams._told, 5.0)

    async def matched(index):
        seat = circle.seats[index]
        with pytest.raises(RoundAborted) as caught:
            await seat.exchange.exchange(firsts[index], Due(1, seat.tokens, circle.locals()[index]), seat.state)
        await seat.exchange.release(firsts[index], caught.value)

    await asyncio.wait_for(asyncio.gather(*map(matched, range(1, count))), 20.0)
    await until_judged(others, firsts[0].id)
    only_these_two(others, victim, liar)


@COUNTS
async def test_a_member_whose_round_is_ended_while_it_waits_says_by_whom(network, tmp_path, count):
    """The liar joins all but the victim, and ends the round for the victim alone; the others have begun by then."""
    circle, victim, others, liar = await seated(network, tmp_path, count)

    async def slow(_, send, kind, __):
        if kind is Kind.SEAL_SENT:
            await asyncio.sleep(0.5)
        await send()

    async def lying(stream, send, kind, _):
        if stream.remote != victim.peer_id:
            return await send()
        if kind is Kind.JOIN:
            await asyncio.sleep(0.05)
            await liar_says(stream, Kind.ABORT, dump_json(AbortMessage(reason="")))
        return await asyncio.Event().wait()

    said = {id(stream): stream.send for stream in liar.exchange._group.outbound.values()}

    async def liar_says(stream, kind, body):
        await said[id(stream)](kind, body)

    for seat in others:
        sends_by(seat, slow)
    sends_by(liar, lying)
    group = liar.exchange._group.identifier
    rounds = [asyncio.ensure_future(one(circle, index)) for index in range(count)]
    await asyncio.wait_for(asyncio.gather(*rounds[:-1]), 30.0)
    await until_judged(others, group)
    only_these_two(others, victim, liar)
    rounds[-1].cancel()


@COUNTS
async def test_who_has_not_joined_is_not_late_while_the_window_is_open(network, tmp_path, count):
    """The liar joins first, which opens the window of 6 s, and leaves after 4; the victim still trains."""
    circle, _, others, liar = await seated(network, tmp_path, count)

    async def joins(index):
        seat = circle.seats[index]
        with pytest.raises(RoundAborted) as caught:
            await seat.exchange.next_round(Due(1, seat.tokens, circle.locals()[index]), seat.state, seat.position, 6.0)
        await seat.exchange.dissolve(caught.value, tell=True)

    group = liar.exchange._group.identifier
    first = asyncio.ensure_future(joins(count - 1))
    rest = [asyncio.ensure_future(joins(index)) for index in range(1, count - 1)]
    await asyncio.sleep(4.0)
    await liar.exchange.dissolve(RoundAborted("match", "others want to take part"))
    await asyncio.wait_for(asyncio.gather(*rest), 10.0)
    first.cancel()
    await until_judged(others, group)
    assert all(not seat.guard.stalls._debts._debts for seat in others)


@COUNTS
async def test_a_member_does_not_leave_for_a_newcomer_once_most_have_joined(network, tmp_path, count):
    """The liar joins all but the victim, at which a newcomer calls."""
    circle, victim, others, liar = await seated(network, tmp_path, count)

    async def lying(stream, send, kind, _):
        if stream.remote == victim.peer_id and kind is Kind.JOIN:
            await asyncio.Event().wait()
        await send()

    sends_by(liar, lying)
    called = asyncio.Event()

    async def newcomer():
        inboxes = victim.exchange._group.buffers.inboxes.values()
        await until(lambda: sum(inbox.join.done() for inbox in inboxes) == count - 2)
        called.set()

    async def waits():
        due = Due(1, victim.tokens, circle.locals()[0])
        with pytest.raises(RoundAborted) as caught:
            await victim.exchange.next_round(due, victim.state, victim.position, 20.0, newcomer)
        assert called.is_set()
        await victim.exchange.dissolve(caught.value, tell=True)

    group = liar.exchange._group.identifier
    work = [waits(), *(one(circle, index) for index in range(1, count))]
    await asyncio.wait_for(asyncio.gather(*work), 30.0)
    await until_judged(others, group)
    only_these_two(others, victim, liar)


async def test_a_member_that_reads_nothing_of_one_other_is_in_dispute_with_it_for_all(network, tmp_path):
    circle, victim, others, liar = await seated(network, tmp_path, 4)
    network.retime(min_sending_s=0.3)

    async def unread(stream, send, kind, _):
        if kind is Kind.REDUCED and stream.remote == liar.peer_id:
            await asyncio.Event().wait()
        await send()

    sends_by(victim, unread)
    liar.exchange._words.of_failed = lambda *failed: failed[-1]  # it is silent
    group = liar.exchange._group.identifier
    rounds = [asyncio.ensure_future(one(circle, index)) for index in range(4)]
    await asyncio.wait(rounds[:3], timeout=20.0)
    assert [work.result() for work in rounds[:3]] == [True] * 3
    for seat in others:
        await until(lambda book=seat.guard.stalls: group in book._failures and book._failures[group].settled, 8.0)
    only_these_two(others, victim, liar)
    rounds[3].cancel()
