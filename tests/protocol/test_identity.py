from __future__ import annotations

import base58
import pytest

from peer.protocol.identity import KEY_FILE_BYTES, MAX_PEER_ID_CHARS, SIGNATURE_BYTES, Identity, verify

# RFC 8032, section 7.1, test 1
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
KEY_FILE = b"\x08\x01\x12\x40" + SEED + PUBLIC
# base58btc of 00 24 08 01 12 20 | PUBLIC, as the libp2p peer-ids specification has it
PEER_ID = "12D3KooWQK1wnefoLrcVHbbnf5tLzbopUd3K3bFAoJpA7YJgL5pV"
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def base58_by_hand(raw):
    number, text = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + text


def test_the_peer_id_of_a_published_key_is_the_one_that_libp2p_computes():
    identity = Identity.from_bytes(KEY_FILE)
    assert identity.peer_id == PEER_ID
    assert base58_by_hand(b"\x00\x24\x08\x01\x12\x20" + PUBLIC) == PEER_ID


def test_the_key_file_is_the_protobuf_that_libp2p_reads():
    assert KEY_FILE_BYTES == 68
    assert Identity.from_bytes(KEY_FILE).to_bytes() == KEY_FILE


def test_a_generated_identity_survives_its_file():
    identity = Identity.generate()
    again = Identity.from_bytes(identity.to_bytes())
    assert again.peer_id == identity.peer_id
    assert verify(identity.peer_id, "vote", b"text", again.sign("vote", b"text"))
    assert Identity.generate().peer_id != identity.peer_id


@pytest.mark.parametrize(
    "content",
    [b"", KEY_FILE[:-1], KEY_FILE + b"\0", b"\x08\x00" + KEY_FILE[2:], SEED, KEY_FILE[:-32] + bytes(32)],
    ids=["empty", "short", "long", "rsa", "bare seed", "another public half"],
)
def test_other_key_files_are_refused(content):
    with pytest.raises(ValueError, match=r"not a libp2p|public half"):
        Identity.from_bytes(content)


def test_a_signature_is_bound_to_signer_domain_and_message():
    identity, other = Identity.from_bytes(KEY_FILE), Identity.generate()
    signature = identity.sign("vote", b"message")
    assert len(signature) == SIGNATURE_BYTES
    assert verify(PEER_ID, "vote", b"message", signature)
    assert not verify(PEER_ID, "join", b"message", signature)
    assert not verify(PEER_ID, "vote", b"messagf", signature)
    assert not verify(other.peer_id, "vote", b"message", signature)
    assert not verify(PEER_ID, "vote", b"message", b"")
    assert not verify(PEER_ID, "vote", b"message", signature[:-1])
    assert not verify(PEER_ID, "vote", b"message", signature + b"\0")


def test_domain_and_message_cannot_be_shifted_against_each_other():
    identity = Identity.from_bytes(KEY_FILE)
    assert not verify(PEER_ID, "vot", b"emessage", identity.sign("vote", b"message"))
    assert not verify(PEER_ID, "vote-message", b"", identity.sign("vote", b"-message"))


def test_no_flipped_bit_of_a_signature_verifies():
    identity = Identity.from_bytes(KEY_FILE)
    signature = identity.sign("vote", b"message")
    for bit in range(8 * len(signature)):
        flipped = bytearray(signature)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not verify(PEER_ID, "vote", b"message", bytes(flipped)), bit


HOSTILE = {
    "empty": "",
    "too long": "1" * (MAX_PEER_ID_CHARS + 1),
    "a megabyte": "2" * 1_000_000,
    "not base58": PEER_ID[:-1] + "0",
    "not ascii": PEER_ID[:-1] + "\ufffd",
    "rsa": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "secp256k1": base58.b58encode(b"\x00\x25\x08\x02\x12\x21\x02" + PUBLIC).decode(),
    "one byte short": base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + PUBLIC[:-1]).decode(),
    "leading one": "1" + PEER_ID,
}


@pytest.mark.parametrize("peer_id", HOSTILE.values(), ids=HOSTILE.keys())
def test_nothing_verifies_for_a_hostile_peer_id(peer_id):
    assert not verify(peer_id, "vote", b"message", Identity.from_bytes(KEY_FILE).sign("vote", b"message"))


@pytest.mark.parametrize("alias", [PEER_ID + " ", PEER_ID + "\n", " " + PEER_ID, PEER_ID + "\t "])
def test_one_key_has_one_peer_id(alias):
    signature = Identity.from_bytes(KEY_FILE).sign("vote", b"message")
    assert not verify(alias, "vote", b"message", signature)
