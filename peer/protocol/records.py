"""Signed DHT records: schemas, sizes, expiry.

A sealed record is `length of peer id (1 byte) | peer id | signature (64) | payload`. A node that stores or reads one
checks the signature, the size and the expiry first, and one bad record never invalidates its neighbours.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import FailFast, Field, ValidationError

from peer.errors import ProtocolError
from peer.protocol.identity import MAX_PEER_ID_CHARS, SIGNATURE_BYTES, Identity, verify
from peer.protocol.manifest import (
    MAX_MANIFEST_BYTES,
    PROTOCOL_VERSION,
    Digest,
    Name,
    RunManifest,
    Spec,
    check_protocol,
)
from peer.protocol.pinning import check_pinned
from peer.protocol.ranges import RangesText
from peer.protocol.spec import Message

MAX_RECORD_BYTES = 4096
MAX_PEER_RECORD_BYTES = 1280  # some 900 with long names, large numbers and leases
MAX_LINES = 48  # of which a peer record says how fast they are
LINE_NAME_CHARS = 4
SERIAL_BYTES = 8
MAX_EXPIRY_S = 120.0
PEER_TTL_S = 15.0
CLOCK_SKEW_S = 3.0  # as hivemind lets two nodes differ
MANIFEST_TTL_S = 110.0
MAX_RUNS = 8  # of one node: with four records each they fit what the DHT keeps of a peer
SHARED_TTL_S = 110.0
MANIFEST_KEY = "atoll/manifest"
ITEMS = (b",", b"[", b"{")
SpecT = TypeVar("SpecT", bound=Spec)

Count = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0.0, lt=1e12)]
HOST_PATTERN = r"^/(ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:-]{1,63}/tcp/[0-9]{1,5}$"
HostText = Annotated[str, Field(pattern=HOST_PATTERN)]
MAX_HOST_ADDRESSES = 3
PASS_PATTERN = r"^([0-9]{1,9}\.[0-9]{1,12}\.[A-Za-z0-9_-]{86})?$"


class PeerRecord(Message):
    """What a peer says of itself every few seconds; every number is its own claim and is only displayed or bounded.

    Attributes:
        serial: grows with each record of a peer, across restarts: an older record never replaces a newer one.
        lines: how fast its lines to others are: ends of peer ids, and letters; see `peer.swarm.gossip.line_meter`.
        leases: shards of the run's data that it trains on, or has trained on without a certificate so far.
        invitation: its pass, in a run that is for invited peers; see `peer.protocol.invitation`.
        addresses: where it listens, as multiaddresses without its id; loopback only where it has no other.
        work: solves the puzzle of this identity in this run.
        expires_at: wall-clock seconds; a record in the DHT expires then, neither earlier nor later.
    """

    protocol: Annotated[int, Field(ge=PROTOCOL_VERSION, le=PROTOCOL_VERSION)] = PROTOCOL_VERSION
    run_id: Digest
    nickname: Name
    state: Literal["joining", "training", "paused", "finished"]
    round: Count
    lineage_id: Digest
    lineage_weight: Count
    step: Count = 0
    tokens: Count = 0
    tokens_per_s: Seconds = 0.0
    loss: Annotated[float, Field(ge=0.0, lt=1e6)] | None = None
    group_size: Annotated[int, Field(ge=0, le=64)] = 0
    client: bool = False  # accepts no connection: it dials the others
    relayed: bool = False  # a client that can be reached through a relay
    addresses: Annotated[tuple[HostText, ...], Field(max_length=MAX_HOST_ADDRESSES), FailFast()] = ()
    lines: Annotated[str, Field(pattern=r"^([1-9A-HJ-NP-Za-km-z]{4}[A-Z])*$", max_length=5 * MAX_LINES)] = ""
    leases: RangesText = ""
    invitation: Annotated[str, Field(pattern=PASS_PATTERN)] = ""
    bytes_sent: Count = 0
    bytes_received: Count = 0
    seconds_waiting: Seconds = 0.0
    serial: Count = 0
    work: Count = 0
    expires_at: Seconds


def peers_key(run_id: str) -> str:
    """DHT key under which the peers of a run announce themselves, one subkey a peer."""
    return f"atoll/{run_id}/peers"


def checkpoints_key(run_id: str) -> str:
    """DHT key under which the checkpoints of a run lie, one subkey a signer."""
    return f"atoll/{run_id}/checkpoints"


def seal(identity: Identity, domain: str, payload: bytes) -> bytes:
    """payload -> signed record bytes."""
    signer = identity.peer_id.encode()
    return bytes([len(signer)]) + signer + identity.sign(domain, payload) + payload


def signer_of(blob: bytes) -> str:
    """Who says to have signed record bytes that `open_sealed` has taken, or takes."""
    return blob[1 : 1 + blob[0]].decode("ascii", errors="replace")


def open_sealed(domain: str, blob: bytes, limit: int = MAX_RECORD_BYTES) -> tuple[str, bytes]:
    """Signed record bytes -> (signer's peer id, payload).

    Raises:
        ProtocolError: larger than `limit`, truncated, or not signed by the peer it names.
    """
    if len(blob) > limit:
        raise ProtocolError(f"record of {len(blob)} bytes; the limit is {limit}")
    if not blob or blob[0] > MAX_PEER_ID_CHARS or len(blob) < 1 + blob[0] + SIGNATURE_BYTES:
        raise ProtocolError("truncated record")
    end = 1 + blob[0]
    signer = signer_of(blob)
    signature, payload = blob[end : end + SIGNATURE_BYTES], blob[end + SIGNATURE_BYTES :]
    if not verify(signer, domain, payload, signature):
        raise ProtocolError(f"record of {signer!r} has no valid signature")
    return signer, payload


def parse_json(schema: type[SpecT], payload: bytes, context: Mapping[str, bool] | None = None) -> SpecT:
    """Strict JSON -> one of our schemas; raises ProtocolError, never anything else. `context`: see `read_manifest`."""
    items = sum(map(payload.count, ITEMS))
    if items > schema.most_items:
        raise ProtocolError(f"malformed {schema.__name__}: {items} items; at most {schema.most_items}")
    try:
        return schema.model_validate_json(payload, strict=True, context=context)
    except (ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {schema.__name__}: {_first_of(error)}") from None


def _first_of(error: Exception) -> str:
    """The first error in words. To write all of them, or the whole input, would take seconds."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).splitlines()[:3])
    count, first = error.error_count(), error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" + (f", and {count - 1} errors more" if count > 1 else "")


def dump_json(message: Spec) -> bytes:
    """The bytes that `parse_json` reads back; canonical, so that equal messages have equal digests."""
    return json.dumps(message.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


class SealedManifest(NamedTuple):
    """A manifest as its organiser published it; of one organiser and one name the highest serial is the current one."""

    organiser: str
    manifest: RunManifest
    serial: int
    blob: bytes

    @property
    def owner(self) -> str:
        """The subkey under which it lies in the DHT: an organiser may have several runs, by their names."""
        return f"{self.organiser}/{self.manifest.name}"

    @property
    def opened_at(self) -> float:
        """Wall-clock seconds when it was published first, or again after another: serials are not below the time."""
        return self.serial / 1000


def seal_manifest(identity: Identity, manifest: RunManifest, serial: int) -> bytes:
    """Compress and sign a manifest; the serial is beside it, so that it does not change the run id.

    Raises:
        ProtocolError: it does not fit a record.
    """
    blob = seal(identity, "manifest", serial.to_bytes(SERIAL_BYTES, "big") + zlib.compress(manifest.canonical(), 9))
    if len(blob) > MAX_RECORD_BYTES:
        raise ProtocolError(f"the signed manifest is {len(blob)} bytes; a record holds {MAX_RECORD_BYTES}")
    return blob


def open_manifest(blob: bytes) -> SealedManifest:
    """Signed record bytes -> manifest. Raises ProtocolError, or UserError for an incompatible version."""
    organiser, payload = open_sealed("manifest", blob)
    manifest = _strict_manifest(unpacked_manifest(payload), f"the manifest of {organiser}")
    return SealedManifest(organiser, manifest, int.from_bytes(payload[:SERIAL_BYTES], "big"), blob)


def unpacked_manifest(payload: bytes) -> bytes:
    """The text of a signed manifest, at most MAX_MANIFEST_BYTES. Raises ProtocolError."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(payload[SERIAL_BYTES:], MAX_MANIFEST_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"manifest does not unpack: {error}") from None
    if not unpacker.eof:
        raise ProtocolError(f"manifest unpacks to more than {MAX_MANIFEST_BYTES} bytes")
    return text


def _strict_manifest(text: bytes, origin: str) -> RunManifest:
    # JSON only: YAML from strangers brings aliases that grow without bound and many ways for a parser to fail
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"{origin} is not JSON") from None
    if not isinstance(document, dict):
        raise ProtocolError(f"{origin} is not a JSON object")
    check_protocol(document.get("protocol"), origin)
    manifest = parse_json(RunManifest, text)
    check_pinned(manifest, origin)
    return manifest
