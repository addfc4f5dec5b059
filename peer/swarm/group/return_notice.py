"""Tells the last group of a peer that it is back, as the DHT takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from peer.swarm.group.invites import Invites
from peer.swarm.net.node import Node

NO_HURRY_S = 1e9  # on the wire: the invited peer need not hurry


class ReturnNotice:
    """Tells other peers that this one is back, at most every self._node.timing.return_period_s."""

    def __init__(self, node: Node, invites: Invites) -> None:
        self._node, self._invites, self._clock = node, invites, node.clock
        self._said_at, self._saying = float("-inf"), tuple[asyncio.Task[None], ...]()

    def say(self, peer_ids: Iterable[str]) -> None:
        """Notify these, unless they were notified a moment ago. It hurries no peer."""
        now = self._clock()
        if now < self._said_at + self._node.timing.return_period_s:
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
            await asyncio.wait_for(self._invites.send(peer_id, NO_HURRY_S), self._node.timing.invited_s)
