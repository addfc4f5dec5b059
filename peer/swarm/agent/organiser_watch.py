"""Whether the bootstrap of this run still serves it: one that was started with another manifest leaves it alone."""

from __future__ import annotations

import asyncio
import logging

from hivemind.p2p import P2PDaemonError

from peer.swarm.catchup.history_server import history_name
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError

log = logging.getLogger(__name__)
LOOKS = 2  # in a row: a bootstrap that is just starting is connected before it serves


async def organiser_left(node: Node, run_id: str, organiser: str) -> str:
    """Wait until the organiser's node is up and does not serve this run; -> what that means, for a person."""
    looks = 0
    while looks < LOOKS:
        await asyncio.sleep(node.timing.organiser_period_s)
        looks = looks + 1 if await _serves_another(node, run_id, organiser) else 0
    return (
        f"the bootstrap {organiser} now serves another run: it was started with another manifest. This run continues "
        f"without it; others join it through the address of a member, with --run-id {run_id}"
    )


async def _serves_another(node: Node, run_id: str, organiser: str) -> bool:
    try:
        stream = await node.open(organiser, history_name(run_id), "history")
    except StreamClosedError:
        if node.resting:  # and asks nothing
            return False
        try:
            return organiser in await asyncio.wait_for(node.connected(), node.timing.open_timeout_s)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError):
            return False
    stream.close()
    return False
