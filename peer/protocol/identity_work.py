"""A hash puzzle bound to a key and a run: an identity costs processor time once, and a glance to verify.

SHA-256 of the key, the run and a nonce must begin with a number of zero bits (Back 2002, "Hashcash"). 21 bits take
2^21 hashes in the mean, about a second of one core.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

MAX_NONCE = 2**53
_DIGEST_BITS = 256


@dataclass(frozen=True)
class IdentityWork:
    """What a run asks of its members' identities.

    Attributes:
        run_id: 64 hex digits.
        bits: zero bits; 0 asks for nothing.
        nonce: this peer's own solution.
    """

    run_id: str = ""
    bits: int = 0
    nonce: int = 0

    def shown(self, peer_id: str, nonce: int) -> bool:
        """Whether `nonce` solves the puzzle of this peer in this run."""
        return self.bits == 0 or _solves(_begun(peer_id, self.run_id), nonce, _limit(self.bits))

    def search(self, peer_id: str, first: int, count: int) -> int | None:
        """The lowest solution among `count` nonces from `first` on, if there is one."""
        begun, limit = _begun(peer_id, self.run_id), _limit(self.bits)
        return next((nonce for nonce in range(first, first + count) if _solves(begun, nonce, limit)), None)


NO_WORK = IdentityWork()


def _begun(peer_id: str, run_id: str) -> hashlib._Hash:
    return hashlib.sha256(b"atoll-identity-work-1\0" + f"{run_id} {peer_id} ".encode())


def _limit(bits: int) -> bytes:
    """What a digest with so many zero bits, at least one, is below."""
    return (1 << (_DIGEST_BITS - bits)).to_bytes(_DIGEST_BITS // 8, "big")


def _solves(begun: hashlib._Hash, nonce: int, limit: bytes) -> bool:
    hasher = begun.copy()
    hasher.update(nonce.to_bytes(8, "big"))
    return hasher.digest() < limit
