"""Ed25519 identities as libp2p knows them: the peer id *is* the public key, so a signature needs no certificate.

Source: libp2p peer-ids specification (an identity multihash of the protobuf-encoded public key).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from peer.errors import ProtocolError

# protobuf headers: field 1 (key type) = 1 (Ed25519), field 2 (data) = 64 or 32 bytes
_PRIVATE_HEADER = b"\x08\x01\x12\x40"
_PUBLIC_HEADER = b"\x08\x01\x12\x20"
_IDENTITY_MULTIHASH = b"\x00\x24"
KEY_FILE_BYTES = len(_PRIVATE_HEADER) + 64
SIGNATURE_BYTES = 64
MAX_PEER_ID_CHARS = 64
KNOWN_KEYS = 256


@dataclass(frozen=True)
class Identity:
    """A private key with the peer id that follows from it."""

    private_key: Ed25519PrivateKey
    peer_id: str

    @classmethod
    def generate(cls) -> Identity:
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, key_file: bytes) -> Identity:
        """Parse the content of a libp2p private-key file; raises ValueError on anything but an Ed25519 key."""
        if len(key_file) != KEY_FILE_BYTES or not key_file.startswith(_PRIVATE_HEADER):
            raise ValueError("not a libp2p Ed25519 private key")
        seed = key_file[len(_PRIVATE_HEADER) :][:32]
        identity = cls._of(Ed25519PrivateKey.from_private_bytes(seed))
        if identity.to_bytes() != key_file:  # libp2p would take the id from the stored public half
            raise ValueError("its public half does not belong to its private half")
        return identity

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> Identity:
        public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return cls(key, base58.b58encode(_IDENTITY_MULTIHASH + _PUBLIC_HEADER + public).decode())

    def to_bytes(self) -> bytes:
        """The libp2p private-key file; keep it at mode 0600."""
        seed = self.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        public = self.private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return _PRIVATE_HEADER + seed + public

    def sign(self, domain: str, message: bytes) -> bytes:
        """64-byte signature, bound to `domain` so that one kind of statement never passes as another."""
        return self.private_key.sign(_statement(domain, message))


def verify(peer_id: str, domain: str, message: bytes, signature: bytes) -> bool:
    """True if the owner of `peer_id` signed `message` in `domain`."""
    try:
        _public_key(peer_id).verify(signature, _statement(domain, message))
    except (InvalidSignature, ProtocolError):
        return False
    return True


@lru_cache(KNOWN_KEYS)  # reading base58 takes twice as long as to verify a signature
def _public_key(peer_id: str) -> Ed25519PublicKey:
    header = _IDENTITY_MULTIHASH + _PUBLIC_HEADER
    if len(peer_id) > MAX_PEER_ID_CHARS:
        raise ProtocolError(f"peer id of {len(peer_id)} characters; the limit is {MAX_PEER_ID_CHARS}")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        raise ProtocolError(f"peer id {peer_id!r} is not base58") from None
    if len(raw) != len(header) + 32 or not raw.startswith(header):
        raise ProtocolError(f"peer id {peer_id!r} does not hold an Ed25519 key")
    if base58.b58encode(raw).decode() != peer_id:  # the decoder drops trailing spaces: one key would have many ids
        raise ProtocolError(f"peer id {peer_id!r} is not in its one canonical spelling")
    return Ed25519PublicKey.from_public_bytes(raw[len(header) :])


def _statement(domain: str, message: bytes) -> bytes:
    return b"atoll/" + domain.encode() + b"\0" + message
