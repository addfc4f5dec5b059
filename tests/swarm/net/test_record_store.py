"""What one node holds of the DHT under floods and replays."""

from __future__ import annotations

import random

import pytest
from hivemind.utils import MSGPackSerializer

from peer.protocol.identity import Identity
from peer.protocol.records import MANIFEST_KEY, PEER_TTL_S, peers_key, seal
from peer.swarm.net import record_store
from peer.swarm.net.dht_validator import key_id
from peer.swarm.net.record_store import MAX_ANSWER_BYTES, MAX_RECORDS, MAX_RECORDS_OF_A_PEER, RecordStore
from tests.swarm.net.published import ALICE, BOB, NOW, packed, sealed_peer
from tests.swarm.runs import RUN

PEERS, MANIFESTS = key_id(peers_key(RUN)), key_id(MANIFEST_KEY)
OWN = Identity.generate()


class Shelf(RecordStore):
    """A node's store at a time that the test sets."""

    def __init__(self):
        self.now = NOW
        super().__init__(OWN.peer_id, lambda: self.now)
        self.run_ids = {RUN}

    def announce(self, signer, *, key=PEERS, sender=None, expires_at=None, **changes):
        expires_at = expires_at or self.now + PEER_TTL_S
        blob = sealed_peer(signer, expires_at=expires_at, **changes)
        return self.put(key, *packed(signer.peer_id, blob), expires_at, signer.peer_id if sender is None else sender)

    def publish(self, signer, serial, *, expires_in=100.0, sender="", size=50):
        blob = seal(signer, "manifest", serial.to_bytes(8, "big") + bytes(size))
        return self.put(MANIFESTS, *packed(signer.peer_id, blob), self.now + expires_in, sender)

    def serial_of(self, signer):
        blob = MSGPackSerializer.loads(self.records(MANIFESTS)[signer.peer_id][0])
        return int.from_bytes(blob[1 + blob[0] + 64 :][:8], "big")


def identities(count):
    return [Identity.generate() for _ in range(count)]


def test_what_it_holds_it_tells_until_it_expires():
    shelf = Shelf()
    assert shelf.announce(ALICE)
    assert list(shelf.records(PEERS)) == [ALICE.peer_id] == list(shelf.answer(PEERS).data)
    shelf.now += PEER_TTL_S
    assert shelf.records(PEERS) == {}
    assert (shelf.answer(PEERS), len(shelf)) == (None, 0)


def test_only_its_signer_hands_in_a_peer_record():
    shelf = Shelf()
    assert not shelf.announce(ALICE, sender=BOB.peer_id)
    assert shelf.announce(ALICE, sender="")  # read from another node
    assert not shelf.announce(BOB, sender=ALICE.peer_id)
    assert list(shelf.records(PEERS)) == [ALICE.peer_id]


def test_an_older_peer_record_does_not_replace_a_newer_one():
    shelf = Shelf()
    assert shelf.announce(ALICE, serial=2, nickname="new")
    newest = shelf.records(PEERS)
    assert not shelf.announce(ALICE, serial=2, expires_at=shelf.now + PEER_TTL_S - 1, nickname="old")
    assert not shelf.announce(ALICE, serial=1, expires_at=shelf.now + PEER_TTL_S - 1, nickname="old")
    assert shelf.records(PEERS) == newest
    shelf.now += 1.0
    assert shelf.announce(ALICE, serial=3)
    assert shelf.records(PEERS) != newest


@pytest.mark.parametrize("when", ["while the newer is held", "after it has expired", "after a flood of numbers"])
def test_an_older_manifest_does_not_replace_a_newer_one_however_long_it_lives(when):
    shelf = Shelf()
    assert shelf.publish(ALICE, serial=2, expires_in=50.0)
    shelf.now += 60.0 * (when == "after it has expired")
    if when == "after a flood of numbers":
        shelf._newest.clear()
    assert not shelf.publish(ALICE, serial=1, expires_in=119.0)
    assert shelf.publish(ALICE, serial=2, expires_in=60.0, sender=BOB.peer_id)  # others repeat it
    assert shelf.serial_of(ALICE) == 2
    assert shelf.publish(ALICE, serial=3, expires_in=10.0)
    assert shelf.serial_of(ALICE) == 3


def test_a_signer_has_so_many_keys():
    shelf = Shelf()
    runs = [f"{number:064x}" for number in range(MAX_RECORDS_OF_A_PEER + 8)]
    held = [shelf.announce(ALICE, key=key_id(peers_key(run)), run_id=run) for run in runs]
    assert held == [True] * MAX_RECORDS_OF_A_PEER + [False] * 8
    assert shelf.announce(BOB)


def test_a_sender_repeats_so_many_records_of_others():
    shelf = Shelf()
    held = [shelf.publish(signer, 1, sender=BOB.peer_id) for signer in identities(MAX_RECORDS_OF_A_PEER + 3)]
    assert held == [True] * MAX_RECORDS_OF_A_PEER + [False] * 3


def test_a_crowd_takes_no_place_of_the_known_nor_of_those_that_came_before(monkeypatch):
    monkeypatch.setitem(MAX_RECORDS, "peer", 20)
    shelf = Shelf()
    established, early, late, crowd = identities(1)[0], identities(10), identities(1)[0], identities(60)
    for signer in early:
        assert shelf.announce(signer)
    shelf.now += 1.0
    for signer in crowd:
        shelf.announce(signer)
    shelf.known = lambda peer_id: peer_id == established.peer_id
    shelf.now += 1.0
    assert shelf.announce(established)
    assert not shelf.announce(late)
    held = list(shelf.records(PEERS))
    assert len(held) == 20
    assert held[0] == established.peer_id
    assert {signer.peer_id for signer in early} <= set(held)


def test_what_was_read_elsewhere_yields_to_what_was_handed_in(monkeypatch):
    monkeypatch.setitem(MAX_RECORDS, "peer", 10)
    shelf = Shelf()
    for signer in identities(10):
        assert shelf.announce(signer, sender="")
    shelf.now += 1.0
    assert shelf.announce(ALICE)
    assert ALICE.peer_id in shelf.records(PEERS)
    assert not shelf.announce(BOB, sender="")


def test_an_answer_is_bounded_and_names_the_known_first(monkeypatch):
    monkeypatch.setattr(record_store, "MAX_ANSWER_BYTES", 10_000)
    monkeypatch.setattr(record_store, "random", random.Random(7))
    shelf = Shelf()
    crowd = identities(60)
    for signer in crowd:
        assert shelf.announce(signer)
    assert shelf.announce(ALICE)
    shelf.known = lambda peer_id: peer_id == ALICE.peer_id
    answers = [shelf.answer(PEERS) for _ in range(40)]
    assert all(len(MSGPackSerializer.dumps(answer)) < 10_000 for answer in answers)
    assert all(ALICE.peer_id in answer.data for answer in answers)
    told = set().union(*(answer.data for answer in answers))
    assert told == {ALICE.peer_id, *(signer.peer_id for signer in crowd)}  # each stranger now and then


def test_other_runs_fill_what_is_left_for_them_and_take_nothing_of_this_one(monkeypatch):
    monkeypatch.setattr(record_store, "MAX_FOREIGN_BYTES", 20_000)
    shelf = Shelf()
    run = "c" * 64
    held = [shelf.announce(signer, key=key_id(peers_key(run)), run_id=run) for signer in identities(60)]
    assert 10 < sum(held) < 30
    assert shelf.announce(ALICE)
    shelf.now += PEER_TTL_S
    shelf.sweep()
    assert shelf.announce(BOB, key=key_id(peers_key(run)), run_id=run)


def test_records_that_are_renewed_for_ever_leave_nothing_behind():
    shelf = Shelf()
    for serial in range(1000):
        assert shelf.announce(ALICE, serial=serial)
        shelf.now += 0.01
    assert len(shelf) == 1
    assert sum(shelf._of_owner.values()) == sum(shelf._of_sender.values()) == 1
    shelf.now += PEER_TTL_S
    shelf.sweep()
    assert (len(shelf), shelf._of_owner, shelf._of_sender, shelf._keys) == (0, {}, {}, {})


def test_a_full_answer_fits_a_call():
    assert MAX_ANSWER_BYTES + 20 * 64 < 1 << 19
