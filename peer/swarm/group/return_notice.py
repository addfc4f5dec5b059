"""Tells the last group of a peer that it is back, as the DHT takes seconds to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from peer.swarm.group.invites import Invites
from peer.swarm.group.membership import INVITED_S
from peer.swarm.net.node import Node

RETURN_EVERY_S = 2.0  # is said: a peer that follows quick rounds would say nothing else
NO_HURRY_S = 1e9


class ReturnNotice:
    """Says that this peer is back, now and then.

    Args:
        node: the network.
        invites: to invite a peer is to say so.
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
        """It need not be said any more."""
        for task in self._saying:
            task.cancel()
        self._saying = ()

    async def _say(self, peer_id: str) -> None:
        with contextlib.suppress(asyncio.TimeoutError):  # the directory has heard of it by then
            await asyncio.wait_for(self._invites.send(peer_id, NO_HURRY_S), INVITED_S)
