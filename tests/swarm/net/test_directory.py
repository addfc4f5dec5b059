"""How often a peer says who it is, and what it knows of others while the DHT is silent."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

from peer.link.messages import DataUse
from peer.protocol.coverage import Coverage
from peer.protocol.identity import Identity
from peer.protocol.records import (
    MAX_RECORD_BYTES,
    PEER_TTL_S,
    PeerRecord,
    dump_json,
    open_sealed,
    parse_json,
    seal,
)
from peer.swarm.agent.lease_book import LeaseBook
from peer.swarm.agent.leases import DataLeases
from peer.swarm.net import directory
from peer.swarm.net.directory import Directory, read_records
from tests.swarm.gathering import until
from tests.swarm.net.published import ALICE, BOB, NOW, peer_record, sealed_peer
from tests.swarm.runs import RUN


class Store:
    """A DHT that takes what it is given, and when."""

    def __init__(self):
        self.times = []

    async def store(self, *_, **__):
        self.times.append(asyncio.get_running_loop().time())
        return True


async def test_a_swarm_of_quick_rounds_does_not_announce_each_of_them(network):
    network.retime(announce_pause_s=0.2, refresh_period_s=1000.0)
    node = network.node()
    node.dht = Store()
    announcer = Directory(node, RUN)
    announcer.announce(
        lambda: PeerRecord(
            run_id=RUN, nickname="one", state="training", round=0, lineage_id=RUN, lineage_weight=0,
            expires_at=announcer.expiry(),
        )
    )

    def five_rounds_later():
        announcer.announce_soon()
        return len(node.dht.times) >= 5

    await until(five_rounds_later, 30.0)
    gaps = [after - before for before, after in zip(node.dht.times, node.dht.times[1:], strict=False)]
    assert min(gaps) >= 0.2 - 1e-3


class Silent(Store):
    """A DHT whose nodes sleep for as long as `record` is None."""

    record = None

    async def get(self, *_, **__):
        if self.record is None:
            await asyncio.Event().wait()
        owner, blob = self.record
        return SimpleNamespace(value={owner: SimpleNamespace(value=blob)})


async def test_a_dht_that_is_silent_takes_nobody_from_the_directory_before_its_record_expires(network):
    network.retime(dht_timeout_s=0.05)
    now, other = 1000.0, Identity.generate()
    node = network.node()
    node.dht = Silent()
    reader = Directory(node, RUN, clock=lambda: now)
    record = PeerRecord(
        run_id=RUN, nickname="other", state="training", round=0, lineage_id=RUN, lineage_weight=0,
        expires_at=reader.expiry(),
    )  # fmt: skip
    node.dht.record = other.peer_id, seal(other, "peer", dump_json(record))
    await reader.refresh()
    assert (list(reader.peers), reader.fresh) == ([other.peer_id], True)
    node.dht.record = None
    now += PEER_TTL_S - 1.0
    await reader.refresh()
    assert (list(reader.peers), reader.fresh) == ([other.peer_id], False)
    now += 1.0
    assert list(reader.peers) == []


class Told(Store):
    """A DHT that answers with what a test puts in."""

    def __init__(self):
        super().__init__()
        self.records = {}

    def tell(self, signer, **changes):
        self.records[signer.peer_id] = sealed_peer(signer, **changes)

    async def get(self, *_, **__):
        return SimpleNamespace(value={o: SimpleNamespace(value=blob) for o, blob in self.records.items()})


def reader_of(network):
    node = network.node()
    node.dht = Told()
    return node.dht, Directory(node, RUN, clock=lambda: NOW)


async def test_an_old_record_that_is_published_again_hides_no_peer(network):
    dht, reader = reader_of(network)
    dht.tell(ALICE, serial=7, round=7)
    dht.tell(BOB, serial=9, round=9)
    await reader.refresh()
    dht.tell(ALICE, serial=6, round=6, expires_at=NOW + 10.0)
    dht.tell(BOB, serial=10, round=10)
    await reader.refresh()
    assert {peer_id: record.round for peer_id, record in reader.peers.items()} == {ALICE.peer_id: 7, BOB.peer_id: 10}
    del dht.records[ALICE.peer_id]
    await reader.refresh()
    assert list(reader.peers) == [BOB.peer_id]
    dht.tell(ALICE, serial=6, round=6)  # forgotten records do not come back either
    await reader.refresh()
    assert list(reader.peers) == [BOB.peer_id]


async def test_serials_grow_with_each_record_and_across_a_restart(network):
    _, first = reader_of(network)
    serials = [parse_json(PeerRecord, open_sealed("peer", first.sealed(peer_record()))[1]).serial for _ in range(3)]
    later = Directory(network.node(), RUN, clock=lambda: NOW + 1.0)
    serials.append(parse_json(PeerRecord, open_sealed("peer", later.sealed(peer_record()))[1]).serial)
    assert serials == sorted(set(serials))


async def test_a_crowd_hides_none_of_the_known_nor_of_those_that_were_here(network, monkeypatch):
    monkeypatch.setattr(directory, "MAX_PEERS", 20)
    dht, reader = reader_of(network)
    early = [Identity.generate() for _ in range(5)]
    for signer in early:
        dht.tell(signer)
    await reader.refresh()
    dht.records = {}
    for signer in (Identity.generate() for _ in range(60)):
        dht.tell(signer)
    for signer in (*early, ALICE):
        dht.tell(signer)
    reader.known = lambda peer_id: peer_id == ALICE.peer_id
    await reader.refresh()
    assert len(reader.peers) == 20
    assert {ALICE.peer_id, *(signer.peer_id for signer in early)} <= set(reader.peers)


async def test_each_record_is_opened_once_however_often_it_is_read(network, monkeypatch):
    """A thousand of strangers took a quarter of a second at each read, in one piece."""
    dht, reader = reader_of(network)
    opened, opening = [], directory.open_sealed
    monkeypatch.setattr(directory, "open_sealed", lambda *sealed: opened.append(1) or opening(*sealed))
    dht.tell(ALICE)
    dht.records[BOB.peer_id] = b"malformed"
    for _ in range(3):
        await reader.refresh()
    assert (list(reader.peers), len(opened)) == ([ALICE.peer_id], 2)
    dht.tell(ALICE, serial=2)
    await reader.refresh()
    assert len(opened) == 3


async def test_a_reader_stops_at_its_own_limit(network, monkeypatch):
    monkeypatch.setattr(directory, "MAX_RECORDS_READ", 30)
    dht, reader = reader_of(network)
    dht.records = {f"peer{number}": b"x" * (MAX_RECORD_BYTES + number % 2) for number in range(100)}
    found = await read_records(reader._node, "any")
    assert len(found) == 30
    assert {len(blob) for blob in found.values()} == {MAX_RECORD_BYTES}


async def test_forged_and_replayed_leases_change_nothing(network):
    dht, reader = reader_of(network)
    history = SimpleNamespace(chain=range(5), seen=Counter({ALICE.peer_id: 3}), coverage=Coverage((20,)))
    trainer = SimpleNamespace(tell=lambda _: None)
    reader.announce_soon = lambda: None
    own = DataLeases([LeaseBook(RUN, "own", 60.0)], history, reader, trainer)

    async def free():
        await reader.refresh()
        own.hear(DataUse(wanted=(0,)))
        return 20 - int(own.seen[0].mask(0).sum())

    dht.tell(ALICE, serial=7, leases="0:4-6")
    assert await free() == 18
    dht.records[ALICE.peer_id] = sealed_peer(BOB, serial=9, leases="0:0-16")  # in another peer's place
    assert await free() == 20
    honest = sealed_peer(ALICE, serial=8, leases="0:4-5")
    dht.records[ALICE.peer_id] = honest.replace(b"0:4-5", b"0:0-9")
    assert await free() == 20
    dht.records[ALICE.peer_id] = honest
    assert await free() == 19
    dht.tell(ALICE, serial=7, leases="0:4-6")  # handed back, and published again by another peer
    assert await free() == 19
