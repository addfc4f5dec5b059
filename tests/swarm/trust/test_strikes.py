"""What a peer makes of what it saw itself, and of what it was told."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.records import parse_json
from peer.protocol.wire import AbortMessage, HelloMessage, Kind, RejectMessage
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.trust.strikes import STRIKES, StrikeCounter
from tests.swarm.circle import Circle
from tests.swarm.gathering import gather, join_of, until
from tests.swarm.table import NAME


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_refusals_grow_and_end():
    clock = Clock()
    strikes = StrikeCounter(STANDARD, clock)
    waits = []
    for _ in range(8):
        for strike in range(STRIKES):
            assert not strikes.refuses("x"), strike
            strikes.saw("x", "a frame that is none")
        began = clock.now
        while strikes.refuses("x"):
            clock.now += 1.0
        waits.append(clock.now - began)
    assert waits[:3] == [STANDARD.first_refusal_s, 2 * STANDARD.first_refusal_s, 4 * STANDARD.first_refusal_s]
    assert waits[-1] == STANDARD.longest_refusal_s
    assert not strikes.refuses("y")


def test_whoever_never_shows_anything_is_refused_and_whoever_does_is_not():
    strikes = StrikeCounter(STANDARD, Clock())
    for turn in range(10):
        strikes.unanswered("often")
        strikes.unanswered("often")
        strikes.answered("often")
        assert not strikes.refuses("often"), turn
        strikes.unanswered("never")
    assert strikes.refuses("never")


def test_no_number_of_offenders_fills_the_memory():
    strikes = StrikeCounter(STANDARD, Clock())
    for number in range(5000):
        strikes.saw(str(number), "x")
    assert len(strikes._pasts) <= 1024


async def test_hearsay_is_not_held_against_anybody(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    byzantine, one, other = circle.seats
    firsts, locals_ = [circle._first(seat) for seat in circle.seats], circle.locals()
    jobs = [asyncio.ensure_future(circle.one_round(index, locals_[index], firsts[index])) for index in (1, 2)]
    await until(lambda: one.exchange._group is not None, 30.0)
    stream = await byzantine.node.open(one.peer_id, NAME, "round")
    await stream.send_message(Kind.HELLO, HelloMessage(group_id=firsts[0].id))
    await stream.send_message(Kind.ABORT, AbortMessage(reason="it lies", culprit=other.peer_id))
    with pytest.raises(RoundAborted) as caught:
        await asyncio.wait_for(jobs[0], 30.0)
    await one.exchange.release(firsts[1], caught.value)
    with pytest.raises(RoundAborted):
        await asyncio.wait_for(jobs[1], 30.0)
    assert caught.value.culprit == other.peer_id
    assert one.guard.strikes._pasts == {}


async def test_who_is_refused_gets_no_seat_and_does_not_lead(network):
    first, second, third = await gather(network, 3)
    for member in (second, third):
        refused = {first.peer_id}
        member.itself.refuses = refused.__contains__
    assert second.matchmaker.membership.leader() == second.peer_id
    stream = await first.hand_in(second, join_of(first.node.identity)[0])
    reject = parse_json(RejectMessage, (await stream.receive({Kind.REJECT: 10_000}))[1])
    assert reject.reason == "excluded"
    stream.close()
    groups = await asyncio.gather(second.match(), third.match())
    assert [{member.peer_id for member in group.members} for group in groups] == [{second.peer_id, third.peer_id}] * 2


async def test_nothing_is_taken_from_the_banned(network):
    one, two = network.node(), network.node()
    heard = []

    async def listen(stream):
        heard.append(stream.remote)

    await one.serve("anything", "round", listen)
    one.refuses = {two.peer_id}.__contains__
    stream = await two.open(one.peer_id, "anything", "round")
    await asyncio.wait_for(stream.closed(), 5.0)
    assert heard == []
