"""A member has all others say that an honest one did not join, and is in dispute with none itself.

By an attacker who had not written the defence.
"""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import Due, RoundAborted, link_of
from peer.protocol.wire import Kind
from peer.swarm.round.giving_up import Lack
from peer.swarm.round.joining import Joining
from peer.swarm.runtime.futures import has_come
from tests.swarm.round.test_delayed import sends_by
from tests.swarm.round.test_left_alone import seated, until_judged
from tests.swarm.stalling import refused

WINDOW_S, ANSWERS_S = 2.0, 0.27  # 30 s and 4 s, scaled
PATIENCE_S = WINDOW_S + ANSWERS_S
HASTY_S = 1.2  # less than half of the deadline, which is 4 s here
COUNTS = pytest.mark.parametrize("count", [4, 8])


def known(circle, rounds=5):
    """The last seat is of a member with so many rounds, the others have 50."""
    seen = {seat.peer_id: 50 for seat in circle.seats} | {circle.seats[-1].peer_id: rounds}
    for seat in circle.seats:
        seat.rosters._seen = lambda: seen


async def first_round(circle):
    for seat in circle.seats:
        await seat.exchange.dissolve(RoundAborted("match", "another group forms"))
    circle._joins = None
    locals_, firsts = circle.locals(), [circle._first(seat) for seat in circle.seats]
    rounds = (circle.one_round(index, locals_[index], first) for index, first in enumerate(firsts))
    await asyncio.wait_for(asyncio.gather(*rounds), 30.0)


async def joins(circle, seat, after_s):
    """As `match` does it."""
    await asyncio.sleep(after_s)
    due = Due(1, seat.tokens, circle.locals()[circle.seats.index(seat)])
    try:
        if seat.exchange.can_continue(seat.position):
            await seat.exchange.next_round(due, seat.state, seat.position, PATIENCE_S)
    except RoundAborted as abort:
        await seat.exchange.dissolve(abort)


def keeps_its_join_from(liar, victim):
    stream = liar.exchange._group.outbound[victim.peer_id]
    send = stream.send

    async def sends(kind, *rest, **more):
        if kind is not Kind.ABORT:
            await asyncio.Event().wait()
        await send(kind, *rest, **more)

    stream.send = sends


@COUNTS
async def test_a_join_that_is_kept_from_one_member_opens_the_round_for_no_other(network, tmp_path, count, monkeypatch):
    """The others hear of the round at once, and join at the end of the window; the victim hears of it from them."""
    circle, victim, _, liar = await seated(network, tmp_path, count)
    known(circle)
    network.retime(solo_patience_s=ANSWERS_S)
    honest, honestly, loop = circle.seats[:-1], Joining.all_come, asyncio.get_running_loop()

    async def all_come(self, *arguments):
        if self._joins.keys() != liar.exchange._group.buffers.inboxes.keys():
            return await honestly(self, *arguments)
        while not all(has_come(join) for peer_id, join in self._joins.items() if peer_id != victim.peer_id):
            await asyncio.sleep(0.01)
        await asyncio.sleep(max(0.0, began + 0.92 * PATIENCE_S - loop.time()))
        return RoundAborted("match", "it did not come"), Lack("join", frozenset({victim.peer_id}))

    monkeypatch.setattr(Joining, "all_come", all_come)
    for again in (False, True):
        if again:
            await first_round(circle)
        group, began = liar.exchange._group.identifier, loop.time()
        keeps_its_join_from(liar, victim)
        others = [joins(circle, seat, WINDOW_S) for seat in honest if seat is not victim]
        await asyncio.gather(joins(circle, liar, 0.0), joins(circle, victim, 1.9 * WINDOW_S), *others)
        await until_judged([seat for seat in honest if seat is not victim], group)
    for seat in honest:
        assert victim.peer_id not in refused(circle, seat)
        assert seat is victim or liar.peer_id in refused(circle, seat)


@pytest.mark.parametrize("rounds", [5, 80])
@COUNTS
async def test_who_never_joins_is_refused_by_all_also_by_the_first_that_waits(network, tmp_path, count, rounds):
    circle, first, _, liar = await seated(network, tmp_path, count)
    known(circle, rounds)
    network.retime(solo_patience_s=ANSWERS_S)
    honest = circle.seats[:-1]
    for again in (False, True):
        if again:
            await first_round(circle)
        group = liar.exchange._group.identifier
        await asyncio.gather(*(joins(circle, seat, 0.0 if seat is first else WINDOW_S / 2) for seat in honest))
        await until_judged(honest, group)
    assert [refused(circle, seat) for seat in honest] == [{liar.peer_id}] * len(honest)


async def until_one_fails(circle, index):
    seat = circle.seats[index]
    while seat.exchange.can_continue(seat.position):
        first, due = None, Due(1, seat.tokens, circle.locals()[index])
        try:
            first = await seat.exchange.next_round(due, seat.state, seat.position, HASTY_S)
            exchanged = await seat.exchange.exchange(first, due, seat.state)
            link = await link_of(first, exchanged, seat.state, seat.state.digest())
            certificate = await seat.exchange.commit(first, link)
        except RoundAborted as abort:
            await (seat.exchange.dissolve(abort) if first is None else seat.exchange.release(first, abort))
            return
        seat.state.apply(exchanged.update, seat.state.round + 1, certificate.link.id)
        await seat.exchange.release(first, None, seat.position)


@COUNTS
async def test_a_member_that_is_kept_in_a_round_says_so_before_the_others_call_it_late(network, tmp_path, count):
    """The liar withholds its shard from one: the others commit, and wait for that one in the next round."""
    circle, victim, _, liar = await seated(network, tmp_path, count)
    known(circle)
    mute = set()

    async def lying(stream, send, kind, _):
        if kind is Kind.SEAL_REDUCED and stream.remote == victim.peer_id:
            mute.add(stream.remote)
            stream.close = lambda: None  # nothing is said on it, and it does not end
        if stream.remote not in mute:
            await send()

    sends_by(liar, lying)
    group = liar.exchange._group.identifier
    await asyncio.wait_for(asyncio.gather(*(until_one_fails(circle, index) for index in range(count))), 30.0)
    await until_judged(circle.seats[:-1], group)
    for seat in circle.seats[1:-1]:
        assert all(liar.peer_id in pair for pair in seat.guard.stalls._debts._debts)
        assert seat.guard.stalls._failures[group].lacks[victim.peer_id] == Lack("reduced", frozenset({liar.peer_id}))
