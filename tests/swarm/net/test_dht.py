"""Introducers that are plain nodes of hivemind: they get no place in the routing table, and are asked for every key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from peer.swarm.net.dht import BoundedDHT, node_id_of
from tests.swarm.net.published import ALICE, BOB

PLAIN, OTHER = PeerID.from_base58(ALICE.peer_id), PeerID.from_base58(BOB.peer_id)


class Protocol:
    """Answers pings with the node ids that a test gives; `pinged` are those that it was sent to."""

    bucket_size = 20

    def __init__(self, **answers):
        self.routing_table = SimpleNamespace(uid_to_peer_id={})
        self.answers, self.pinged = answers, []

    async def call_ping(self, peer):
        self.pinged.append(peer)
        return self.answers["plain"] if peer == PLAIN else node_id_of(str(peer))

    async def call_find(self, peer, keys):
        assert peer == PLAIN
        return {keys[0]: (None, {node_id_of(str(OTHER)): OTHER})}


@pytest.fixture
def dht():
    made = BoundedDHT(_initialized_with_create=True)
    made.protocol, made.node_id, made.peer_id = Protocol(plain=DHTID.generate()), DHTID.generate(), PeerID(b"own")
    return made


async def test_a_plain_node_is_asked_for_each_key_until_it_is_gone(dht):
    assert dht._also_asked() == []
    assert await dht.meet(PLAIN)
    assert dht.protocol.pinged == [PLAIN, OTHER], "those that it knows are met as well"
    assert dht._also_asked() == [PLAIN]
    dht.protocol.answers["plain"] = None
    assert not await dht.meet(PLAIN)
    assert dht._also_asked() == []


async def test_a_node_of_atoll_has_its_place_in_the_routing_table_alone(dht):
    assert await dht.meet(OTHER)
    assert (dht.protocol.pinged, dht._also_asked()) == ([OTHER], [])
