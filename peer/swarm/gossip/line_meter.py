"""How fast the lines between this peer and the others are: measured one by one, and said in this peer's record."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from functools import lru_cache

from peer.outer.topology.measured import agreed_links
from peer.outer.topology.topologies import Links
from peer.protocol.records import LINE_NAME_CHARS, MAX_LINES
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.probe import line_speed, ping

SLOWEST, FASTEST = 10, 35  # exponents of two, in bytes a second: 1 kB/s to 34 GB/s
STEADY = 0.75  # powers of two by which a line must change before this peer says something else


class LineMeter:
    """Measures the lines to the peers of a run, those of which nothing is known first.

    Attributes:
        said: what this peer's record says of its lines; `spoken` reads it.
    """

    def __init__(self, node: Node, directory: Directory, rng: random.Random) -> None:
        self._node, self._directory, self._rng = node, directory, rng
        self._exponents: dict[str, int] = {}

    @property
    def said(self) -> str:
        """For each peer the end of its id, and a letter for its speed."""
        return "".join(f"{_name(peer_id)}{chr(ord('A') + e - SLOWEST)}" for peer_id, e in self._exponents.items())

    def links(self, peers: Sequence[str]) -> Links | None:
        """The links between these peers, as all that see the same records take them; member i is at index i."""
        records, names = self._directory.peers, [_name(peer_id) for peer_id in peers]
        texts = [self.said if p == self._node.peer_id else records[p].lines if p in records else "" for p in peers]
        return _links(tuple(texts), tuple(names))

    async def run(self) -> None:
        """Measure one line after the other, for ever."""
        while True:
            there = [p for p, record in self._directory.reachable.items() if record.state == "training"]
            self._exponents = {p: e for p, e in self._exponents.items() if p in self._directory.peers}
            unknown = [peer_id for peer_id in there if peer_id not in self._exponents]
            if len(self._exponents) < MAX_LINES and unknown:
                await self.measure(self._rng.choice(unknown))
            elif known := [peer_id for peer_id in self._exponents if peer_id in there]:
                await asyncio.sleep(self._node.timing.line_pause_s)
                await self.measure(known[0])
            await asyncio.sleep(self._node.timing.refresh_period_s)

    async def measure(self, peer_id: str) -> None:
        """Measure the line to one peer, if it has time for that; it is then the last to be measured again."""
        rate = await bytes_s_to(self._node, peer_id)
        before = self._exponents.pop(peer_id, None)
        if rate is not None:
            now = math.log2(rate)
            kept = before is not None and abs(now - before) <= STEADY
            before = before if kept else min(max(round(now), SLOWEST), FASTEST)
        if before is not None:
            self._exponents[peer_id] = before


@lru_cache(maxsize=4)  # asked several times a round
def _links(texts: tuple[str, ...], names: tuple[str, ...]) -> Links | None:
    places = {name: place for place, name in enumerate(names)}
    return agreed_links([
        {places[name]: rate for name, rate in spoken(text).items() if name in places} for text in texts
    ])


async def bytes_s_to(node: Node, peer_id: str) -> float | None:
    """Of the slower direction of the line to a peer; None if it has no time to measure that."""
    pinged = await ping(node, peer_id)
    speed = await line_speed(node, peer_id, 0.0 if pinged is None else pinged.rtt_s)
    return None if speed is None else min(speed.up, speed.down) / 8


def spoken(said: str) -> dict[str, float]:
    """Bytes/s by the end of a peer's id, from what a record says."""
    size = LINE_NAME_CHARS + 1
    whole = [said[at : at + size] for at in range(0, len(said), size)]
    return {one[:-1]: 2.0 ** (SLOWEST + ord(one[-1]) - ord("A")) for one in whole}


def _name(peer_id: str) -> str:
    return peer_id[-LINE_NAME_CHARS:]
