"""What joiners take of a donor's time, in rounds and between them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from peer.swarm.runtime import round_priority
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.runtime.timing import STANDARD


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


class Clock:
    """Goes as a test says. Who waits is woken by the real one, within milliseconds, and looks at this one again."""

    def __init__(self):
        self.now, self.read_in_thread = 100.0, threading.Event()

    def __call__(self):
        if threading.current_thread() is not threading.main_thread():
            self.read_in_thread.set()
        return self.now


@pytest.fixture
def clock(monkeypatch):
    wait_for = asyncio.wait_for
    monkeypatch.setattr(round_priority.asyncio, "wait_for", lambda work, left: wait_for(work, left / 1e4))
    return Clock()


async def taken(rounds, clock, order, name, took):
    async with rounds.turn():
        order.append((name, round(clock.now, 6)))
        clock.now += took


async def test_a_turn_comes_when_the_round_is_over():
    rounds, order = RoundPriority(), []

    async def take(name):
        async with rounds.turn():
            order.append(name)

    await take("before")
    rounds.round_begins()
    turns = [asyncio.ensure_future(take(name)) for name in "abc"]
    await settled()
    assert order == ["before"]
    rounds.round_ends()
    await asyncio.gather(*turns)
    assert sorted(order[1:]) == ["a", "b", "c"]


async def test_what_is_left_to_do_for_a_round_goes_first_too(clock):
    rounds, order = RoundPriority(clock=clock), []
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    rounds.round_begins()
    rounds.round_ends(first)
    turn = asyncio.ensure_future(taken(rounds, clock, order, "a", 0.0))
    await settled()
    rounds.round_begins()
    first.set_result(None)  # of a round that has another one behind it by now
    await settled()
    assert order == []
    rounds.round_ends(second)
    await settled()
    assert order == []
    second.set_result(None)
    await turn
    rounds.round_ends(second)
    await taken(rounds, clock, order, "b", 0.0)
    assert [name for name, _ in order] == ["a", "b"]


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def test_joiners_take_their_share_of_a_round_that_lasts(clock):
    rounds, order = RoundPriority(clock=clock), []
    rounds.round_begins()
    turns = [asyncio.ensure_future(taken(rounds, clock, order, name, 0.03125)) for name in range(2)]
    await settled()
    assert not order
    clock.now += STANDARD.round_untouched_s - 0.01
    await settled()
    assert not order
    clock.now += 0.01
    await until(lambda: len(order) == 1)
    clock.now += 3.0
    await settled()
    assert len(order) == 1
    clock.now += 0.09375
    await asyncio.gather(*turns)
    assert [at for _, at in order] == [105.0, 105.0 + 0.03125 / round_priority.SHARE]


async def test_nobody_waits_for_longer_than_a_joiner_has_patience(clock):
    rounds, order = RoundPriority(clock=clock), []
    rounds.round_begins()
    clock.now += STANDARD.round_untouched_s
    async with rounds.turn():  # of somebody who does not read
        other = asyncio.ensure_future(taken(rounds, clock, order, "other", 0.0))
        await settled()
        assert not order
        clock.now += STANDARD.io_turn_s
        await other
    assert order == [("other", 105.0 + STANDARD.io_turn_s)]


async def test_a_chunk_that_took_long_holds_the_next_one_up_no_longer_than_that(clock):
    rounds, order = RoundPriority(clock=clock), []
    rounds.round_begins()
    clock.now += STANDARD.round_untouched_s
    await taken(rounds, clock, order, "slow", 5.0)
    turn = asyncio.ensure_future(taken(rounds, clock, order, "next", 0.0))
    await settled()
    clock.now += STANDARD.io_turn_s
    await turn
    assert order == [("slow", 105.0), ("next", 110.0 + STANDARD.io_turn_s)]


async def test_a_turn_that_a_round_overtakes_stands_aside_in_its_thread(clock):
    rounds, order = RoundPriority(clock=clock), []

    def work(aside):
        aside()
        order.append("went on")

    async with rounds.turn() as turn:
        turn.aside()  # for nobody
        rounds.round_begins()
        working = asyncio.ensure_future(asyncio.to_thread(work, turn.aside))
        assert await asyncio.to_thread(clock.read_in_thread.wait, 60.0)  # it looks how long it has to wait
        order.append("round over")
        rounds.round_ends()
        await working
    assert order == ["round over", "went on"]


async def test_a_turn_stands_aside_no_longer_than_it_would_have_waited(clock):
    rounds = RoundPriority(clock=clock)
    async with rounds.turn() as turn:
        rounds.round_begins()
        clock.now += STANDARD.round_untouched_s
        turn.aside()
        await turn.wait()
        async with rounds.turn() as inside:  # which has its part of the round: nobody else has, until it is over
            inside.aside()
            await inside.wait()
            waiting = asyncio.ensure_future(turn.wait())
            await settled()
            assert not waiting.done()
            clock.now += STANDARD.io_turn_s - STANDARD.round_untouched_s
            turn.aside()
            await waiting


async def test_a_turn_that_a_round_overtakes_waits_in_the_loop(clock):
    rounds = RoundPriority(clock=clock)
    async with rounds.turn() as turn:
        await turn.wait()  # for nobody
        rounds.round_begins()
        waiting = asyncio.ensure_future(turn.wait())
        await settled()
        assert not waiting.done()
        rounds.round_ends()
        await waiting
