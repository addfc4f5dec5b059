from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peer.swarm.rounds import Rounds


@pytest.mark.parametrize("how", ["it leaves between rounds", "its rounds are cancelled"])
async def test_a_peer_that_leaves_ends_its_standing_group(monkeypatch, how):
    rounds, ended = Rounds.__new__(Rounds), []

    async def wait(_):
        await asyncio.Event().wait()

    async def dissolve(abort, tell=False):
        ended.append((abort.reason, tell))

    monkeypatch.setattr(Rounds, "_wait_for_work", wait)
    monkeypatch.setattr(Rounds, "finished", False)
    rounds._exchange, rounds.leaving = SimpleNamespace(dissolve=dissolve), how == "it leaves between rounds"
    running = asyncio.ensure_future(rounds.run())
    await asyncio.sleep(0)
    if not rounds.leaving:
        running.cancel()
    await asyncio.wait({running}, timeout=5.0)
    assert ended == [("this peer leaves", True)]
