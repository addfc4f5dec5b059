"""Introducers that are plain nodes of hivemind: they get no place in the routing table, and are asked for every key."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.records import PEER_TTL_S, PeerRecord, dump_json, peers_key, seal
from peer.swarm.net import record_store
from peer.swarm.net.dht import MAX_CHECKED, MAX_REFUSED, BoundedDHT, DHTProtocol, node_id_of
from peer.swarm.net.dht_validator import key_id
from peer.swarm.net.record_store import RecordStore
from tests.swarm.net.published import ALICE, BOB

PLAIN, OTHER = PeerID.from_base58(ALICE.peer_id), PeerID.from_base58(BOB.peer_id)


class Protocol:
    """Answers pings with the node ids that a test gives; `pinged` are those that it was sent to."""

    bucket_size, plain = 20, frozenset()

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


def answering(node_id):
    """A protocol whose only neighbour answers every call with this node id."""
    made = DHTProtocol(_initialized_with_create=True)
    info = dht_pb2.NodeInfo(node_id=node_id)

    async def answer(request, timeout):  # noqa: ARG001
        found = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        return SimpleNamespace(peer=info, results=[found], dht_time=0.0, available=True)

    made.get_stub = lambda _: SimpleNamespace(rpc_ping=answer, rpc_find=answer)
    made.rpc_semaphore, made.wait_timeout, made.node_info = asyncio.Semaphore(), 1.0, dht_pb2.NodeInfo()
    made.routing_table, made.bucket_size = RoutingTable(DHTID.generate(), 20, 5), 20
    made.storage = RecordStore("own")
    return made


async def test_an_answer_whose_node_id_is_none_is_no_answer():
    hostile = answering(b"\xff" * 1000)
    assert await hostile.call_ping(PLAIN) is None
    assert await hostile.call_find(PLAIN, [DHTID.generate()]) is None
    honest = answering(node_id_of(str(PLAIN)).to_bytes())
    assert await honest.call_ping(PLAIN) == node_id_of(str(PLAIN))
    assert await honest.call_find(PLAIN, [DHTID.generate()]) is not None


async def test_an_answer_of_records_that_nobody_signed_is_not_read_to_its_end():
    protocol, read = answering(node_id_of(str(PLAIN)).to_bytes()), []
    signed = protocol.storage.signed
    protocol.storage.signed = lambda *record: read.append(record) or signed(*record)
    told = DictionaryDHTValue()
    for number in range(100):
        told.store(f"owner {number}", MSGPackSerializer.dumps(b"no record"), time.time() + 10.0)
    found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(told))
    with pytest.raises(ProtocolError, match="are none"):  # so that its node counts as one that does not answer
        await protocol._take(DHTID.generate(), found, plain=False)
    assert (len(read), len(protocol.storage)) == (MAX_REFUSED + 1, 0)
    await protocol._take(DHTID.generate(), found, plain=True)  # it holds what anybody hands in


@pytest.mark.parametrize(
    "entries", [[[7, b"x", 1e10]] * 400, [["a", b"x", 1e10]] * 17_000, [7] * 400, "none", [[]] * 40]
)
async def test_an_answer_of_anything_else_is_not_read_to_its_end_either(entries):
    protocol = answering(node_id_of(str(PLAIN)).to_bytes())
    told = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, 1e10, entries])))
    found, began = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=told), time.process_time()
    with pytest.raises(ProtocolError):
        await protocol._take(DHTID.generate(), found, plain=False)
    assert time.process_time() - began < 0.1  # 250 ms were spent on 17,000 entries


async def test_of_one_answer_no_more_signatures_are_checked_than_a_large_swarm_needs(monkeypatch):
    protocol = answering(node_id_of(str(PLAIN)).to_bytes())
    monkeypatch.setattr(protocol.storage, "read_before", lambda _, subkey, __: subkey in read)
    monkeypatch.setattr(protocol.storage, "put", lambda _, subkey, *__: not read.append(subkey))
    told, read = DictionaryDHTValue(), []
    for number in range(300):
        told.store(f"owner {number}", b"signed", time.time() + 10.0)
    found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(told))
    for answers in range(1, 4):  # what was read before costs nothing
        await protocol._take(DHTID.generate(), found, plain=False)
        assert len(set(read)) == min(300, answers * MAX_CHECKED)


async def test_records_of_a_clock_that_is_ahead_are_no_fault_of_the_node_that_tells_them(monkeypatch):
    protocol = answering(node_id_of(str(PLAIN)).to_bytes())
    monkeypatch.setattr(protocol.storage, "put", lambda *_: False)  # as where they expire too late for this clock
    monkeypatch.setattr(protocol.storage, "signed", lambda *_: True)
    told = DictionaryDHTValue()
    for number in range(100):
        told.store(f"owner {number}", b"signed", time.time() + 10.0)
    found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(told))
    await protocol._take(DHTID.generate(), found, plain=False)


def made_up(count, run_id="ab" * 32):
    """An answer of the DHT with the records of new identities; -> (their key, the answer)."""
    told, expires_at = DictionaryDHTValue(), time.time() + PEER_TTL_S
    record = PeerRecord(
        run_id=run_id, nickname="x", state="training", round=0, lineage_id="a" * 64, lineage_weight=0,
        expires_at=expires_at, serial=1,
    )  # fmt: skip
    for _ in range(count):
        identity = Identity.generate()
        told.store(identity.peer_id, MSGPackSerializer.dumps(seal(identity, "peer", dump_json(record))), expires_at)
    found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(told))
    return DHTID.from_bytes(key_id(peers_key(run_id))), found


async def test_a_peer_that_has_not_worked_takes_no_place():
    protocol = answering(node_id_of(str(PLAIN)).to_bytes())
    place, found = made_up(MAX_REFUSED + 8)
    protocol.storage.serve("ab" * 32, lambda _: False, lambda *_: False)
    await protocol._take(place, found, plain=False)  # a node of another run cannot know what this one asks for
    assert len(protocol.storage) == 0
    protocol.storage.serve("ab" * 32, lambda _: False, lambda *_: True)
    await protocol._take(place, found, plain=False)
    assert len(protocol.storage) == MAX_REFUSED + 8


async def test_what_would_find_no_place_is_not_looked_at(monkeypatch):
    """Twenty nodes that told new made-up peers all the time took a processor, although none of those was held."""
    protocol = answering(node_id_of(str(PLAIN)).to_bytes())
    monkeypatch.setitem(record_store.MAX_RECORDS, "peer", 8)
    place, found = made_up(8)
    await protocol._take(place, found, plain=False)
    held, looks = set(protocol.storage.records(place.to_bytes())), []
    read = protocol.storage._validator.read
    monkeypatch.setattr(protocol.storage._validator, "read", lambda *record: looks.append(record) or read(*record))
    await protocol._take(*made_up(20), plain=False)
    assert (len(looks), set(protocol.storage.records(place.to_bytes()))) == (0, held)
    known = made_up(1)
    protocol.storage.known = lambda _: True
    await protocol._take(*known, plain=False)
    assert (len(looks), len(protocol.storage)) == (1, 8)
    await protocol._take(place, found, plain=False)
    assert len(looks) > 1, "those that are held are renewed"


async def test_a_key_that_is_asked_for_eight_times_is_answered_once():
    protocol = answering(node_id_of(str(PLAIN)).to_bytes())
    place, found = made_up(3)
    await protocol._take(place, found, plain=False)
    request = dht_pb2.FindRequest(keys=[place.to_bytes()] * 8)
    response = await protocol.rpc_find(request, SimpleNamespace(remote_id=PLAIN))
    assert [result.type for result in response.results] == [dht_pb2.FOUND_DICTIONARY] + 7 * [dht_pb2.NOT_FOUND]
