"""What a record of the DHT must be, and what it then says of its place and age."""

from __future__ import annotations

import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from peer.protocol.checkpoints import Checkpoint, seal_checkpoint
from peer.protocol.identity import Identity
from peer.protocol.records import (
    MANIFEST_KEY,
    MAX_EXPIRY_S,
    MAX_PEER_RECORD_BYTES,
    MAX_RECORD_BYTES,
    PEER_TTL_S,
    checkpoints_key,
    dump_json,
    peers_key,
    seal,
)
from peer.protocol.reports import MAX_REPORT_BYTES, reports_key, seal_report
from peer.swarm.net import dht_validator
from peer.swarm.net.dht_validator import Claims, SealedRecordValidator, claims_of, key_id
from tests.swarm.net.published import ALICE, BOB, NOW, OTHER_RUN, peer_record, sealed_peer
from tests.swarm.runs import RUN

OVERHEAD = 1 + len(ALICE.peer_id) + 64
pack = MSGPackSerializer.dumps
PEERS, MANIFESTS, CHECKPOINTS = key_id(peers_key(RUN)), key_id(MANIFEST_KEY), key_id(checkpoints_key(RUN))
REPORTS = key_id(reports_key(RUN))
EXPIRES = NOW + PEER_TTL_S


def record(value=None, *, key=PEERS, owner=ALICE.peer_id, subkey=None, expires=EXPIRES):
    value = pack(sealed_peer()) if value is None else value
    return DHTRecord(key, pack(owner) if subkey is None else subkey, value, expires)


def manifest(size=100, serial=5, signer=ALICE):
    return pack(seal(signer, "manifest", serial.to_bytes(8, "big") + bytes(size - 8)))


def checkpoint(run_id=RUN, signer=ALICE):
    tip = Checkpoint(run_id=run_id, round=3, lineage_id=run_id, serial=9, signed_at=NOW)
    return pack(seal_checkpoint(signer, tip))


def report(run_id=RUN, signer=ALICE):
    return pack(seal_report(signer, run_id, 9, b"{}"))


def long_report(size):
    header = b"R1" + (9).to_bytes(8, "big") + bytes.fromhex(RUN)
    return pack(seal(ALICE, "report", header + b" " * (size - OVERHEAD - len(header))))


def padded(size):
    """A peer record with spaces up to a size in bytes."""
    payload = dump_json(peer_record())
    return pack(seal(ALICE, "peer", payload + b" " * (size - OVERHEAD - len(payload))))


ACCEPTED = {
    "a peer record": record(),
    "the largest peer record": record(padded(MAX_PEER_RECORD_BYTES)),
    "of a clock that is two seconds ahead": record(
        pack(sealed_peer(expires_at=EXPIRES + 2.0)), expires=EXPIRES + 2.0
    ),
    "a manifest": record(manifest(), key=MANIFESTS),
    "the largest manifest": record(manifest(MAX_RECORD_BYTES - OVERHEAD), key=MANIFESTS),
    "the longest": record(manifest(), key=MANIFESTS, expires=NOW + MAX_EXPIRY_S),
    "a checkpoint": record(checkpoint(), key=CHECKPOINTS),
    "a report": record(report(), key=REPORTS),
    "the largest report": record(long_report(MAX_REPORT_BYTES), key=REPORTS),
    "already expired": record(manifest(), key=MANIFESTS, expires=NOW - 1.0),  # harmless: no node keeps it
}
REFUSED = {
    "a key that Atoll does not use": record(key=key_id("atoll/chat")),
    "a random key": record(key=bytes(range(20))),
    "a key of another length": record(key=PEERS[:19]),
    "the directory of another run": record(key=key_id(peers_key(OTHER_RUN))),
    "a peer record under the manifest's key": record(key=MANIFESTS),
    "a manifest in the directory": record(manifest()),
    "a checkpoint in the directory": record(checkpoint()),
    "a checkpoint of another run": record(checkpoint(OTHER_RUN), key=CHECKPOINTS),
    "a report in the directory": record(report()),
    "a report of another run": record(report(OTHER_RUN), key=REPORTS),
    "a report that is too large": record(long_report(MAX_REPORT_BYTES + 1), key=REPORTS),
    "a report of another": record(report(signer=BOB), key=REPORTS),
    "an empty report": record(pack(seal(ALICE, "report", b"R1" + bytes(40))), key=REPORTS),
    "a peer record among reports": record(key=REPORTS),
    "an old record with a later expiry": record(expires=EXPIRES + 1.0),
    "with an earlier one": record(expires=EXPIRES - 1.0),
    "of a clock that is far ahead": record(pack(sealed_peer(expires_at=EXPIRES + 5.0)), expires=EXPIRES + 5.0),
    "a peer record that is too large": record(padded(MAX_PEER_RECORD_BYTES + 1)),
    "no peer record": record(pack(seal(ALICE, "peer", b'{"nickname":1}'))),
    "a manifest without a serial": record(pack(seal(ALICE, "manifest", bytes(8))), key=MANIFESTS),
    "under another's subkey": record(owner=BOB.peer_id),
    "signed by another": record(pack(sealed_peer(signer=BOB))),
    "subkey with a space": record(owner=ALICE.peer_id + " "),
    "empty owner": record(owner=""),
    "owner of another type": record(owner=7),
    "owner as bytes": record(owner=ALICE.peer_id.encode()),
    "an owner of 300 characters": record(owner="x" * 300),
    "no subkey": record(subkey=b""),
    "garbage subkey": record(subkey=b"\xc1"),
    "not signed": record(pack(dump_json(peer_record()))),
    "of a domain that is no record": record(pack(seal(ALICE, "vote", dump_json(peer_record())))),
    "not bytes": record(pack("text")),
    "a list": record(pack([sealed_peer()])),
    "empty": record(b""),
    "garbage msgpack": record(b"\xc1\xff\x00"),
    "truncated msgpack": record(pack(sealed_peer())[:-1]),
    "trailing bytes": record(pack(sealed_peer()) + b"\x00"),
    "nested": record(b"\x91" * 4000 + b"\xc0"),
    "nested JSON": record(pack(seal(ALICE, "checkpoint", b"[" * 3000)), key=CHECKPOINTS),
    "announces 4 GB": record(b"\xc6\xff\xff\xff\xff"),
    "a manifest that is too large": record(manifest(MAX_RECORD_BYTES - OVERHEAD + 1), key=MANIFESTS),
    "far too large": record(manifest(1_000_000), key=MANIFESTS),
    "expires a second late": record(manifest(), key=MANIFESTS, expires=NOW + MAX_EXPIRY_S + 1.0),
    "expires never": record(manifest(), key=MANIFESTS, expires=1e18),
    "expires at infinity": record(expires=float("inf")),
    "expires at nan": record(expires=float("nan")),
    "a manifest that expires at nan": record(manifest(), key=MANIFESTS, expires=float("nan")),
}


@pytest.mark.parametrize("entry", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(entry):
    assert SealedRecordValidator(lambda: NOW).validate(entry) is True


@pytest.mark.parametrize("entry", REFUSED.values(), ids=REFUSED.keys())
def test_refused(entry):
    assert SealedRecordValidator(lambda: NOW).validate(entry) is False


@pytest.mark.parametrize(
    ("value", "key"), [(pack(sealed_peer()), PEERS), (manifest(), MANIFESTS)], ids=["peer", "manifest"]
)
def test_no_flipped_bit_is_accepted(value, key):
    validator = SealedRecordValidator(lambda: NOW)
    for bit in range(0, 8 * len(value), 7):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not validator.validate(record(bytes(flipped), key=key)), bit


def test_the_claims_of_each_kind():
    unpack = MSGPackSerializer.loads
    assert claims_of(PEERS, ALICE.peer_id, sealed_peer(serial=4)) == Claims("peer", RUN, 4, EXPIRES)
    assert claims_of(MANIFESTS, ALICE.peer_id, unpack(manifest(serial=6))) == Claims("manifest", "", 6)
    assert claims_of(CHECKPOINTS, ALICE.peer_id, unpack(checkpoint())) == Claims("checkpoint", RUN, 9)
    assert claims_of(PEERS, Identity.generate().peer_id, sealed_peer()) is None


def test_records_that_have_expired_are_forgotten_however_many_peers_come_and_go():
    held = []
    for second in range(0, 600, 2):
        claims_of(PEERS, ALICE.peer_id, sealed_peer(serial=second), lambda: 1e6 + second)  # noqa: B023
        held.append(len(dht_validator._judged))
    assert held[-1] == held[30] <= 17
    again = claims_of(PEERS, ALICE.peer_id, sealed_peer(serial=598), lambda: 1e6 + 600)
    assert again == Claims("peer", RUN, 598, EXPIRES)
    assert len(dht_validator._judged) == held[-1]  # remembered
