"""Which nodes of the DHT are asked for a key: a few of those near to it, which a search finds now and then."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

SEARCH_EVERY = 16  # uses of a key
WIDELY_EVERY = 4  # reads that also ask the introducers
ASKED = (2, 1)  # of the nodes that records are stored at, and of the others near to the key
ASKED_FIRST = (5, 3)  # until one has answered, and after a search


class Nearest:
    """The nodes nearest to one key, nearest first.

    hivemind searches for each read and each write, and each of twenty nodes then tells all records: in a swarm of 16
    that moved 190 kB/s to each peer, and it grows with the square of the swarm. But each peer of a run holds what it
    has read. So a read asks two of the nodes that all write to, and one other.

    Args:
        replicas: nodes that records are stored at.
        most: nodes that are remembered.

    Attributes:
        answered: whether a node has answered a read.
        slow: whether the last read took long, so that the next one comes late: it asks the introducers, too.
    """

    def __init__(self, key: DHTID, replicas: int, most: int) -> None:
        self._key, self._replicas, self._most = key, replicas, most
        self._uses, self._reads = SEARCH_EVERY, 0
        self._ids: dict[PeerID, DHTID] = {}
        self.answered = False
        self.slow = False

    def due(self) -> bool:
        """Count a use. -> whether a search comes first, whatever becomes of it: a slow one is not repeated at once."""
        self._uses += 1
        if self._ids and self._uses < SEARCH_EVERY:
            return False
        self._uses = 0
        return True

    def found(self, nodes: Iterable[tuple[DHTID, PeerID]]) -> None:
        """A search has found these: those that it has not are forgotten."""
        self._ids = {}
        self.learn(nodes)

    def learn(self, nodes: Iterable[tuple[DHTID, PeerID]]) -> None:
        """These are there as well."""
        known = {node_id: peer for peer, node_id in self._ids.items()} | dict(nodes)
        nearest = sorted(known, key=self._key.xor_distance)[: self._most]
        self._ids = {known[node_id]: node_id for node_id in nearest}

    def silent(self, node: PeerID) -> None:
        """It has not answered: the next one takes its place."""
        self._ids.pop(node, None)

    @property
    def nodes(self) -> list[PeerID]:
        """All of them."""
        return list(self._ids)

    @property
    def replicas(self) -> list[PeerID]:
        """Where records are stored."""
        return self.nodes[: self._replicas]

    def to_ask(self) -> list[PeerID]:
        """The nodes of one read, by lot: none is asked by all, and none can hide a record from a peer for long."""
        near, others = ASKED_FIRST if self._uses == 0 or not self.answered else ASKED
        return [*_some(self.replicas, near), *_some(self.nodes[self._replicas :], others)]

    def widely(self) -> bool:
        """Count a read. -> whether the introducers are asked, too."""
        self._reads += 1
        return self.slow or not self.answered or self._reads % WIDELY_EVERY == 1


def beside(key: DHTID) -> DHTID:
    """A key with the same nodes near to it and no records: what a search asks for, so that no node tells any."""
    return DHTID(int(key) ^ 1)


def _some(nodes: list[PeerID], count: int) -> list[PeerID]:
    return random.sample(nodes, min(count, len(nodes)))
