"""One member says to some what it does not say to others, or lets words be lost, so that all others blame another.

By an attacker who had not written the defence: the first ended each round at no cost, the others parted honest members.
"""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import Due, RoundAborted
from peer.protocol.records import dump_json
from peer.protocol.wire import AbortMessage, HelloMessage, Kind
from peer.protocol.word import HeardWord, SignedWord, Word
from peer.swarm.round.giving_up import Lack, StalledError
from tests.swarm.circle import Circle
from tests.swarm.gathering import until
from tests.swarm.round.test_delayed import one, sends_by
from tests.swarm.round.test_left_alone import seated, until_judged
from tests.swarm.stalling import refused

COUNTS = pytest.mark.parametrize("count", [4, 8])


def on_new_streams(seat, lie):
    """What this member sends on streams that it opens from now on goes through `lie(remote, kind, body, send)`."""
    opening = seat.node.open

    async def opened(peer_id, *arguments, **options):
        stream = await opening(peer_id, *arguments, **options)
        send = stream.send

        async def sends(kind, body=b"", *rest, **more):
            await lie(peer_id, kind, body, lambda: send(kind, body, *rest, **more), send)

        stream.send = sends
        return stream

    seat.node.open = opened


def gives_up(seat, lacking, group=None, **forged):
    group = group or seat.exchange._group.identifier
    word = Word(run_id=seat.rosters.run_id, group=group, lacks="contribution", lacking=(lacking,), delayed_by=())
    signed = SignedWord.of(seat.node.identity, word).model_copy(update=forged)
    return dump_json(AbortMessage(reason="", word=signed))


async def fail(circle):
    """The first round of a new group, which the last seat ends for all others."""
    for seat in circle.seats:
        await seat.exchange.dissolve(RoundAborted("match", "another group forms"))
    circle._joins = None
    firsts, locals_ = [circle._first(seat) for seat in circle.seats], circle.locals()

    async def exchanges(index):
        seat = circle.seats[index]
        with pytest.raises(RoundAborted) as caught:
            await seat.exchange.exchange(firsts[index], Due(1, seat.tokens, locals_[index]), seat.state)
        await seat.exchange.release(firsts[index], caught.value)

    rounds = [asyncio.ensure_future(exchanges(index)) for index in range(len(circle.seats))]
    honest, group = circle.seats[:-1], firsts[0].id
    await asyncio.wait_for(asyncio.gather(*rounds[:-1]), 30.0)
    rounds[-1].cancel()
    await until(lambda: all(group in seat.guard.stalls._failures for seat in honest), 8.0)
    await until_judged(honest, group)


def known(circle, liar_rounds):
    seen = {seat.peer_id: 50 for seat in circle.seats} | {circle.seats[-1].peer_id: liar_rounds}
    for seat in circle.seats:
        seat.rosters._seen = lambda: seen


@pytest.mark.parametrize("rounds", [0, 20, 50])
@COUNTS
async def test_a_member_that_says_it_could_not_begin_is_in_no_circle_of_all(network, tmp_path, count, rounds):
    """The liar sends its contribution to one alone, and says that this one ended the round while it waited."""
    circle, victim, others, liar = await seated(network, tmp_path, count)
    known(circle, rounds)
    only = others[-1]

    async def lie(remote, kind, _, honestly, __):
        if kind is Kind.CONTRIBUTION and remote != only.peer_id:
            await asyncio.Event().wait()
        await honestly()

    on_new_streams(liar, lie)
    word = Lack("waiting", frozenset({victim.peer_id}), frozenset({only.peer_id}))
    liar.exchange._words.of_failed = lambda _, __, abort: StalledError(abort, word)
    for _ in range(2):
        await fail(circle)
    for seat in circle.seats[:-1]:
        assert liar.peer_id in refused(circle, seat)
        assert refused(circle, seat) <= {liar.peer_id, only.peer_id}
        assert rounds == 50 or refused(circle, seat) == {liar.peer_id}


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("count", [3, 4, 8])
async def test_a_member_that_tells_each_another_name_is_banned_by_all(network, tmp_path, count, signs):
    """Where it does not sign, it has not explained itself."""
    circle, _, __, liar = await seated(network, tmp_path, count)
    known(circle, 51)
    honest = circle.seats[:-1]
    order = [seat.peer_id for seat in honest]

    async def lie(remote, kind, _, honestly, send):
        if kind is Kind.ABORT:
            return
        if kind is Kind.CONTRIBUTION:
            other = order[(order.index(remote) + 1) % len(order)]
            await send(Kind.ABORT, gives_up(liar, other, **({} if signs else {"signature": "00" * 64})))
            await asyncio.Event().wait()
        await honestly()

    on_new_streams(liar, lie)
    for _ in range(1 if signs else 2):
        await fail(circle)
    if signs:
        await until(lambda: all(liar.peer_id in seat.guard.bans for seat in honest), 8.0)
    for seat in honest:
        assert [one.peer_id for one in circle.seats if seat.guard.refuses(one.peer_id)] == [liar.peer_id]


@pytest.mark.parametrize("rounds", [20, 50, 90])
@pytest.mark.parametrize("count", [3, 4, 8])
async def test_who_names_another_to_each_at_the_deadline_is_banned_once_they_compare(network, tmp_path, count, rounds):
    """It contributes nothing, so that all give up for that: no member passes its word on."""
    circle, _, __, liar = await seated(network, tmp_path, count)
    known(circle, rounds)
    honest = circle.seats[:-1]
    order, groups = [seat.peer_id for seat in honest], list[str]()
    gather, spoken = liar.exchange._gather, asyncio.Event()

    async def gathering(group, *arguments):
        groups.append(group.id)
        return await gather(group, *arguments)

    async def lie(remote, kind, _, honestly, send):
        if kind is Kind.CONTRIBUTION:
            await asyncio.Event().wait()
        if kind is Kind.ABORT:
            named = order[(order.index(remote) + 1) % len(order)]
            await send(Kind.ABORT, gives_up(liar, named, group=groups[-1]))
            spoken.set()
        else:
            await honestly()

    liar.exchange._gather = gathering
    on_new_streams(liar, lie)
    await fail(circle)
    await until(spoken.is_set, 8.0)  # on a stream of its own, once that is open
    await until(lambda: all(liar.peer_id in seat.guard.bans for seat in honest), 8.0)
    for seat in honest:
        assert [one.peer_id for one in circle.seats if seat.guard.refuses(one.peer_id)] == [liar.peer_id]


@COUNTS
async def test_a_member_that_shows_its_own_word_as_its_reason_has_said_nothing(network, tmp_path, count):
    """One such word ended the round loop of each honest member, and no book was ever closed."""
    circle, victim, _, liar = await seated(network, tmp_path, count)
    group, itself = liar.exchange._group.identifier, liar.peer_id

    def signed(**said):
        return SignedWord.of(liar.node.identity, Word(run_id=liar.rosters.run_id, group=group, **said))

    roster = signed(lacks="roster", lacking=(victim.peer_id,))
    word = signed(lacks="waiting", lacking=(victim.peer_id,), delayed_by=(itself,), cause=roster.signature)
    message = AbortMessage(reason="", word=word, heard=HeardWord(member=itself, word=roster))

    async def lying(stream, send, kind, _):
        if kind is Kind.CONTRIBUTION:
            await stream.send_message(Kind.ABORT, message)
            await asyncio.Event().wait()
        await send()

    sends_by(liar, lying)
    rounds = [asyncio.ensure_future(one(circle, index)) for index in range(count)]
    await asyncio.wait_for(asyncio.gather(*rounds[:-1]), 30.0)  # they fail, as rounds do
    rounds[-1].cancel()
    await until_judged(circle.seats[:-1], group)
    for seat in circle.seats[:-1]:
        assert frozenset({itself}) in seat.guard.stalls._debts._debts


async def test_a_word_on_another_stream_ends_the_group_as_any_word_does(network, tmp_path):
    """Else one could have two others part in the books, while all rounds are committed."""
    _, victim, (other,), liar = await seated(network, tmp_path, 3)
    group = liar.exchange._group.identifier
    stream = await liar.node.open(other.peer_id, liar.exchange.group_streams._name, "round")
    await stream.send_message(Kind.HELLO, HelloMessage(group_id=group))
    await stream.send(Kind.ABORT, gives_up(liar, victim.peer_id))
    await until(lambda: other.exchange._group is None, 5.0)
    assert list(other.guard.stalls._failures) == [group]


@pytest.mark.parametrize("rounds", [5, 50])
@pytest.mark.parametrize("count", [3, 4, 8])
async def test_a_word_is_said_on_a_new_stream_where_the_old_one_is_in_the_middle_of_a_frame(
    network, tmp_path, count, rounds
):
    """The liar ends the round first for a member with a slow line, whose streams to all others are in mid-frame."""
    network.retime(min_exchange_s=20.0, soft_exchange_s=20.0, stall_words_s=1.0, late_roster_s=1.0, least_waste_s=1.0)
    circle = await Circle(network, count, numel=400_000, folder=tmp_path).start()
    known(circle, rounds)
    victim, liar = circle.seats[0], circle.seats[-1]

    class Slow:
        async def sending(self, count):
            await asyncio.sleep(count / 100e3)

        async def received(self, _):
            pass

    opening = victim.node.open

    async def slowly(*arguments, **options):
        stream = await opening(*arguments, **options)
        stream._line = Slow()
        return stream

    async def lie(remote, kind, _, honestly, send):
        if kind is Kind.ABORT:
            return
        if kind is Kind.CONTRIBUTION:
            await asyncio.sleep(0.3 if remote == victim.peer_id else 0.8)
            await send(Kind.ABORT, gives_up(liar, victim.peer_id))
            await asyncio.Event().wait()
        await honestly()

    victim.node.open = slowly
    on_new_streams(liar, lie)
    for _ in range(2):
        await fail(circle)
    for seat in circle.seats[:-1]:
        assert refused(circle, seat) == {liar.peer_id}


@COUNTS
async def test_who_waits_for_a_withheld_join_is_not_first_of_those_that_gave_up(network, tmp_path, count):
    """The liar joins one member alone, and ends the round for one other without a word."""
    circle, began, others, liar = await seated(network, tmp_path, count)
    ended = others[0]
    raw = {stream.remote: stream.send for stream in liar.exchange._group.outbound.values()}

    async def lying(stream, send, kind, _):
        if kind is Kind.JOIN and stream.remote == began.peer_id:
            return await send()
        if kind is Kind.JOIN and stream.remote == ended.peer_id:
            await asyncio.sleep(0.3)
            await raw[ended.peer_id](Kind.ABORT, dump_json(AbortMessage(reason="")))
        return await asyncio.Event().wait()

    sends_by(liar, lying)
    group = liar.exchange._group.identifier
    liar.exchange._close = lambda *_: None
    rounds = [asyncio.ensure_future(one(circle, index)) for index in range(count)]
    await asyncio.wait_for(asyncio.gather(*rounds[:-1]), 30.0)
    rounds[-1].cancel()
    await until_judged(circle.seats[:-1], group)
    for seat in circle.seats[:-1]:
        assert set(seat.guard.stalls._debts._debts) == {frozenset({began.peer_id, liar.peer_id})}
