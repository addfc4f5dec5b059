"""Tells the last group of a peer that it is back, as the DHT takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from peer.swarm.group.invites import Invites
from peer.swarm.group.membership import INVITED_S
from peer.swarm.net.node import Node

RETURN_EVERY_S = 2.0  # between notices: a peer that lags behind fast rounds would send nothing else
NO_HURRY_S = 1e9


class ReturnNotice:
    """Tells other peers that this one is back, at most every RETURN_EVERY_S.

    Args:
        node: the network.
        invites: an invitation is the notice.
        clock: monotonic seconds.
    """

    def __init__(self, node: Node, invites: Invites, clock: Callable[[], float]) -> None:
        self._node, self._invites, self._clock = node, invites, clock
        self._said_at, self._saying = float("-inf"), tuple[asyncio.Task[None], ...]()

    def say(self, peer_ids: Iterable[str]) -> None:
        """Tell these, unless they were told a moment ago. It hurries no peer."""
        now = self._clock()
        if now < self._said_at + RETURN_EVERY_S:
            return
        self.stop()
        self._said_at = now
        self._saying = tuple(self._node.spawn(self._say(peer_id)) for peer_id in peer_ids)

    def stop(self) -> None:
        """Cancel the notices that are under way."""
        for task in self._saying:
            task.cancel()
        self._saying = ()

    async def _say(self, peer_id: str) -> None:
        with contextlib.suppress(asyncio.TimeoutError):  # the directory knows by then
            await asyncio.wait_for(self._invites.send(peer_id, NO_HURRY_S), INVITED_S)
