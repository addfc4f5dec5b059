from __future__ import annotations

import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from peer.protocol.identity import Identity
from peer.protocol.records import MAX_EXPIRY_S, MAX_RECORD_BYTES, seal
from peer.swarm.net.dht_validator import SealedRecordValidator, signed_by

NOW = 1.8e9
ALICE, BOB = Identity.generate(), Identity.generate()
OVERHEAD = 1 + len(ALICE.peer_id) + 64
pack = MSGPackSerializer.dumps


def record(value=None, *, owner=ALICE.peer_id, subkey=None, expires=NOW + 15.0):
    blob = pack(seal(ALICE, "peer", b"payload")) if value is None else value
    return DHTRecord(b"key", pack(owner) if subkey is None else subkey, blob, expires)


def sealed(domain="peer", payload=b"payload", signer=ALICE):
    return pack(seal(signer, domain, payload))


ACCEPTED = {
    "a peer record": record(),
    "a manifest": record(sealed("manifest")),
    "the largest": record(sealed(payload=bytes(MAX_RECORD_BYTES - OVERHEAD))),
    "the longest": record(expires=NOW + MAX_EXPIRY_S),
    "already expired": record(expires=NOW - 1.0),  # harmless: nobody keeps it
}
REFUSED = {
    "under another's subkey": record(owner=BOB.peer_id),
    "signed by another": record(sealed(signer=BOB)),
    "subkey with a space": record(owner=ALICE.peer_id + " "),
    "empty owner": record(owner=""),
    "owner of another type": record(owner=7),
    "owner as bytes": record(owner=ALICE.peer_id.encode()),
    "no subkey": record(subkey=b""),
    "garbage subkey": record(subkey=b"\xc1"),
    "not signed": record(pack(b"payload")),
    "of a domain that is no record": record(sealed("vote")),
    "a join": record(sealed("join")),
    "not bytes": record(pack("text")),
    "a list": record(pack([seal(ALICE, "peer", b"payload")])),
    "empty": record(b""),
    "garbage msgpack": record(b"\xc1\xff\x00"),
    "truncated msgpack": record(sealed()[:-1]),
    "trailing bytes": record(sealed() + b"\x00"),
    "nested": record(b"\x91" * 4000 + b"\xc0"),
    "announces 4 GB": record(b"\xc6\xff\xff\xff\xff"),
    "too large": record(sealed(payload=bytes(MAX_RECORD_BYTES - OVERHEAD + 1))),
    "far too large": record(sealed(payload=bytes(1_000_000))),
    "expires a second late": record(expires=NOW + MAX_EXPIRY_S + 1.0),
    "expires never": record(expires=1e18),
    "expires at infinity": record(expires=float("inf")),
    "expires at nan": record(expires=float("nan")),
}


@pytest.mark.parametrize("entry", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(entry):
    assert SealedRecordValidator(lambda: NOW).validate(entry) is True


@pytest.mark.parametrize("entry", REFUSED.values(), ids=REFUSED.keys())
def test_refused(entry):
    assert SealedRecordValidator(lambda: NOW).validate(entry) is False


def test_no_flipped_bit_is_accepted():
    value = sealed()
    validator = SealedRecordValidator(lambda: NOW)
    for bit in range(0, 8 * len(value), 3):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not validator.validate(record(bytes(flipped))), bit


def test_signed_by_knows_both_kinds_of_record():
    assert signed_by(ALICE.peer_id, seal(ALICE, "peer", b"x"))
    assert signed_by(ALICE.peer_id, seal(ALICE, "manifest", b"x"))
    assert not signed_by(BOB.peer_id, seal(ALICE, "peer", b"x"))
    assert not signed_by(ALICE.peer_id, b"")
