"""How a member of a persistent group waits for the joins of the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peer.swarm.round.arrivals import Arrivals
from peer.swarm.round.joining import Joining, never
from tests.swarm.virtual_time import now


@pytest.mark.parametrize("comes", [False, True])
async def test_a_join_that_comes_as_the_window_ends_is_no_late_one(comes):
    """A machine that wakes handles timer and frame in one turn of its loop: its agent ended with an IndexError."""
    loop = asyncio.get_running_loop()
    join, sent = loop.create_future(), loop.create_future()
    buffers = SimpleNamespace(inboxes={"other": SimpleNamespace(join=join, sent=sent)}, times=Arrivals())
    joining = Joining(buffers, 0.1, now)
    window = joining._window

    async def ends_as_it_comes(patience_s):
        ended = await window(patience_s)
        if comes:
            loop.call_soon(join.set_result, ("sealed", None))  # before the one that waits for the window runs again
        return ended

    joining._window = ends_as_it_comes
    buffers.times.opened = now()
    gives_up = await joining.all_come(0.05, never)
    if comes:
        assert gives_up is None
    else:
        assert gives_up[0].culprit == "other"
