"""What this node stores for others in the DHT: signed, small, soon to expire, under the signer's own subkey."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from peer.errors import ProtocolError
from peer.protocol.records import MAX_EXPIRY_S, MAX_RECORD_BYTES, open_sealed

DOMAINS = ("peer", "manifest", "checkpoint")  # the most frequent first: each is tried
_MSGPACK_OVERHEAD = 16
_REMEMBERED = 1024  # of at most MAX_RECORD_BYTES each


class SealedRecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts a record only if its value is sealed by the peer that its subkey names.

    hivemind calls it before it stores a record for another node and before it accepts a record that it received.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_RECORD_BYTES + _MSGPACK_OVERHEAD or not record.subkey:
            return False
        if not record.expiration_time <= self._clock() + MAX_EXPIRY_S:
            return False
        try:
            blob = MSGPackSerializer.loads(record.value)
            owner = MSGPackSerializer.loads(record.subkey)
        except Exception:  # msgpack raises a wide family on hostile bytes; all of them mean: not a record
            return False
        return isinstance(blob, bytes) and isinstance(owner, str) and signed_by(owner, blob)


@lru_cache(_REMEMBERED)
def signed_by(owner: str, blob: bytes) -> bool:
    """True if `blob` is a record of any known kind sealed by `owner`.

    Cached: every reader of the directory receives a record from each node that stores it, every time.
    """
    for domain in DOMAINS:
        try:
            return open_sealed(domain, blob)[0] == owner
        except ProtocolError:
            continue
    return False
