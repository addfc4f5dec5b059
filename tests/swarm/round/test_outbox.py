"""Waiting for all that an exchange needs."""

from __future__ import annotations

import asyncio

from peer.swarm.round.outbox import _completed
from peer.swarm.runtime.futures import done_at


async def test_once_all_is_there_it_is_known_when_each_came():
    loop = asyncio.get_running_loop()
    first, last = loop.create_future(), loop.create_future()
    times = done_at({"first": first, "last": last}, loop.time)

    async def known() -> set[str]:
        await _completed([first, last], [])
        return set(times)

    waiting = asyncio.create_task(known())
    await asyncio.sleep(0)  # it waits
    first.set_result(None)
    loop.call_soon(last.set_result, None)  # after the waiting task has been woken, and before it runs
    assert await waiting == {"first", "last"}
