from __future__ import annotations

import asyncio

from peer.swarm import courtesy
from peer.swarm.courtesy import Courtesy


async def test_a_turn_comes_when_the_round_is_over():
    rounds = Courtesy()
    await asyncio.wait_for(rounds.turn(), 1.0)
    rounds.round_begins()
    turns = [asyncio.ensure_future(rounds.turn()) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(turn.done() for turn in turns)
    rounds.round_ends()
    await asyncio.wait_for(asyncio.gather(*turns), 0.5)


async def test_a_turn_comes_in_a_round_that_lasts(monkeypatch):
    monkeypatch.setattr(courtesy, "PATIENCE_S", 0.01)
    rounds = Courtesy()
    rounds.round_begins()
    await asyncio.wait_for(rounds.turn(), 5.0)
