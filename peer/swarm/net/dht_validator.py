"""What a record in the DHT must be: signed, small, soon to expire, under a key of Atoll and its signer's subkey."""

from __future__ import annotations

import json
import time
from functools import lru_cache
from typing import Any, NamedTuple

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from peer.errors import ProtocolError
from peer.protocol import hashing
from peer.protocol.checkpoints import CHECKPOINT_DOMAIN
from peer.protocol.control import CONTROL_DOMAIN, control_key
from peer.protocol.records import (
    CLOCK_SKEW_S,
    MANIFEST_KEY,
    MAX_EXPIRY_S,
    MAX_PEER_RECORD_BYTES,
    MAX_RECORD_BYTES,
    PEER_TTL_S,
    SERIAL_BYTES,
    PeerRecord,
    checkpoints_key,
    open_sealed,
    parse_json,
    peers_key,
    unpacked_manifest,
)
from peer.protocol.reports import looks_like_report, report_place, reports_key
from peer.swarm.runtime.expiring import BoundedMap
from peer.system.clock import Clock

_MSGPACK_OVERHEAD = 16
_REMEMBERED = 4096
_KEY_BYTES = 20


class Claims(NamedTuple):
    """What a signed record says of its place and its age.

    Attributes:
        kind: "peer", "manifest", "checkpoint", "control" or "report".
        run_id: whose run; empty for a manifest.
        serial: of two records of one signer under one key the higher one is newer.
        expires_at: wall-clock seconds; None where others may repeat the record for as long as they like.
        work: the nonce of a peer's identity.
    """

    kind: str
    run_id: str
    serial: int
    expires_at: float | None = None
    work: int = 0


_judged: BoundedMap[bytes, tuple[float, Claims | None]] = BoundedMap(_REMEMBERED)  # each with when that was


@lru_cache(64)
def key_id(key: str) -> bytes:
    """Where hivemind puts a key, as 20 bytes."""
    place: bytes = DHTID.generate(source=key).to_bytes()
    return place


def claims_of(key: bytes, owner: str, blob: bytes, clock: Clock = time.monotonic) -> Claims | None:
    """The claims of a record that `owner` has signed and that belongs under this key; None if it is no such record.

    Remembered for a while: every reader of the directory receives a record from each node that stores it, every time.
    """
    mark = _mark(key, owner, blob)
    if mark not in _judged:
        now = clock()
        # twice as long as a peer's record lives; what lives longer is judged again
        while _judged and (oldest := next(iter(_judged.items())))[1][0] < now - 2 * PEER_TTL_S:
            del _judged[oldest[0]]
        try:
            _judged[mark] = now, _claims_of(key, owner, blob)
        except (ProtocolError, ValueError, RecursionError):
            _judged[mark] = now, None
    return _judged[mark][1]


def _mark(key: bytes, owner: str, blob: bytes) -> bytes:
    return hashing.digest(b"\0".join((key, owner.encode(errors="replace"), blob)))


def judged(key: bytes, owner: str, blob: bytes) -> bool:
    """Whether `claims_of` knows these claims without the check of a signature."""
    return _mark(key, owner, blob) in _judged


def _claims_of(key: bytes, owner: str, blob: bytes) -> Claims | None:
    if key == key_id(MANIFEST_KEY):
        signer, payload = open_sealed("manifest", blob)
        serial = int.from_bytes(payload[:SERIAL_BYTES], "big")
        organiser, _, name = owner.partition("/")
        fits = signer == organiser and len(payload) > SERIAL_BYTES and (not name or name == _name_in(payload))
        return Claims("manifest", "", serial) if fits else None
    if len(blob) <= MAX_PEER_RECORD_BYTES and b'"nickname":' in blob:
        signer, payload = open_sealed("peer", blob)
        record = parse_json(PeerRecord, payload)
        fits = signer == owner and key == key_id(peers_key(record.run_id))
        return Claims("peer", record.run_id, record.serial, record.expires_at, record.work) if fits else None
    if looks_like_report(blob):
        signer, run_id, serial = report_place(blob)
        return Claims("report", run_id, serial) if signer == owner and key == key_id(reports_key(run_id)) else None
    kind, place = (CONTROL_DOMAIN, control_key) if b'"announcement":' in blob else (CHECKPOINT_DOMAIN, checkpoints_key)
    signer, payload = open_sealed(kind, blob)
    run_id, serial = _place_of(payload)
    return Claims(kind, run_id, serial) if signer == owner and key == key_id(place(run_id)) else None


def _name_in(payload: bytes) -> str | None:
    document: Any = json.loads(unpacked_manifest(payload))
    return document.get("name") if isinstance(document, dict) else None


def _place_of(payload: bytes) -> tuple[str, int]:
    document: Any = json.loads(payload)
    if not isinstance(document, dict):
        raise ProtocolError("not a JSON object")
    run_id, serial = document.get("run_id"), document.get("serial")
    if not isinstance(run_id, str) or type(serial) is not int or not 0 <= serial < 2**53:
        raise ProtocolError("no run id, or no serial")
    return run_id, serial


def expiry_fits(claims: Claims, expires_at: float, now: float) -> bool:
    """Whether a record may be held until then: a peer's as long as it says itself, others two minutes at most."""
    if claims.expires_at is None:
        return expires_at <= now + MAX_EXPIRY_S
    return abs(expires_at - claims.expires_at) < 1e-3 and expires_at <= now + PEER_TTL_S + CLOCK_SKEW_S


class SealedRecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts a record only if the peer that its subkey names has signed it, for this key and this time."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        return self.read(record.key, record.subkey, record.value, record.expiration_time) is not None

    def read(self, key: bytes, subkey: bytes, value: bytes, expires_at: float) -> tuple[str, Claims] | None:
        """The owner and the claims of a record as it travels, packed by hivemind; None if it is refused."""
        signed = self.signed(key, subkey, value)
        return signed if signed is not None and expiry_fits(signed[1], expires_at, self._clock()) else None

    def signed(self, key: bytes, subkey: bytes, value: bytes) -> tuple[str, Claims] | None:
        """The same whatever the time: None if its owner has not signed it for this key."""
        unpacked = _unpacked(key, subkey, value)
        claims = claims_of(key, *unpacked) if unpacked is not None else None
        return (unpacked[0], claims) if unpacked is not None and claims is not None else None

    def read_before(self, key: bytes, subkey: bytes, value: bytes) -> bool:
        """Whether it takes the check of no signature to say so: it is malformed, or was read before."""
        unpacked = _unpacked(key, subkey, value)
        return unpacked is None or judged(key, *unpacked)


def _unpacked(key: bytes, subkey: bytes, value: bytes) -> tuple[str, bytes] | None:
    """The owner and the blob of a record as it travels; None if it is none."""
    if len(key) != _KEY_BYTES or len(value) > MAX_RECORD_BYTES + _MSGPACK_OVERHEAD or not 0 < len(subkey) < 256:
        return None
    try:
        blob, owner = MSGPackSerializer.loads(value), MSGPackSerializer.loads(subkey)
    except Exception:  # msgpack raises a wide family on hostile bytes; all of them mean: not a record
        return None
    return (owner, blob) if isinstance(blob, bytes) and isinstance(owner, str) else None
