from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from peer.swarm.agent.session import AgentSession


async def test_an_agent_whose_rounds_fail_ends_instead_of_standing_still(network):
    session = AgentSession(SimpleNamespace(tell=print), -1, random.Random(0))

    async def nothing(*_):
        await asyncio.Event().wait()

    async def join(_):
        return

    async def bug():
        raise ZeroDivisionError

    session._show_swarm = nothing
    rounds = SimpleNamespace(join=join, run=bug)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(session._work(network.node(), SimpleNamespace(), rounds, None), 5.0)
