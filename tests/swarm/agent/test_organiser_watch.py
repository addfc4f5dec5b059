"""A bootstrap that serves another run is told of once it is certain; one that is away or slow is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from peer.swarm.agent.organiser_watch import organiser_left
from peer.swarm.catchup.history_server import history_name

OWN, OTHER = "a" * 64, "b" * 64


async def served(stream):
    await stream.closed()


async def test_only_a_bootstrap_that_is_up_and_serves_another_run_is_told_of(network):
    network.retime(organiser_period_s=0.01)
    member, bootstrap = network.node(), network.node()
    connected, looks = set(), asyncio.Queue()

    async def look():
        looks.put_nowait(None)
        return connected

    member.connected = look
    told = asyncio.ensure_future(organiser_left(member, OWN, bootstrap.peer_id))
    for _ in range(5):  # it is away
        await looks.get()
    await bootstrap.serve(history_name(OWN), "history", served)
    connected.add(bootstrap.peer_id)
    await asyncio.wait({told}, timeout=0.3)
    assert not told.done()
    member.line = SimpleNamespace(resting=True)  # and asks nothing
    await asyncio.wait({told}, timeout=0.1)
    assert not told.done()
    member.line = None
    network.hosts[bootstrap.peer_id].handlers.clear()  # it comes back with another manifest
    await bootstrap.serve(history_name(OTHER), "history", served)
    text = await asyncio.wait_for(told, 5.0)
    assert text.startswith(f"the bootstrap {bootstrap.peer_id} now serves another run")
    assert text.endswith(f"--run-id {OWN}")
