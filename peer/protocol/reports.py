"""Reports: what a peer tells those who watch a run, signed, in the DHT beside its peer record.

The signed payload is `MAGIC | serial (8 bytes) | run id (32 bytes) | JSON, compressed`: nodes that store a report never
unpack it. Peers themselves read no report; nothing in it decides anything.
"""

from __future__ import annotations

import zlib
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError
from peer.protocol.identity import SIGNATURE_BYTES, Identity
from peer.protocol.manifest import Spec
from peer.protocol.records import SERIAL_BYTES, Count, open_sealed, seal

REPORT_DOMAIN = "report"
REPORT_TTL_S = 45.0
MAX_REPORT_BYTES = 2048  # so that an answer of the DHT holds more than a hundred
MAX_UNPACKED_BYTES = 32 << 10
MAX_DEVICE_CHARS, MAX_SAMPLE_CHARS = 64, 400
_MAGIC = b"R1"
_RUN_BYTES = 32
_HEADER_BYTES = len(_MAGIC) + SERIAL_BYTES + _RUN_BYTES


class ValidationPoint(Spec):
    """The validation loss of what the run yields, in nats per token, at a round and at so many tokens of all peers."""

    round: Count
    tokens: Count
    loss: Annotated[float, Field(ge=0.0, lt=1e6)]


class TrainerFigures(Spec):
    """What only the trainer of a peer knows of it.

    Attributes:
        device: in the words of its driver.
        utilisation: share of the time that goes into steps, from 0 to 1.
        mfu: share of the device's arithmetic that the model uses; None where its peak is not known.
        validation: the newest.
        sample: a text that the model has written.
    """

    device: Annotated[str, Field(max_length=MAX_DEVICE_CHARS)] = ""
    utilisation: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    mfu: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    validation: ValidationPoint | None = None
    sample: Annotated[str, Field(max_length=MAX_SAMPLE_CHARS)] = ""


def reports_key(run_id: str) -> str:
    """DHT key under which the reports of a run lie, one subkey a peer."""
    return f"atoll/{run_id}/reports"


def seal_report(identity: Identity, run_id: str, serial: int, text: bytes) -> bytes | None:
    """JSON -> signed record bytes; None if it does not fit."""
    if len(text) > MAX_UNPACKED_BYTES:
        return None
    header = _MAGIC + serial.to_bytes(SERIAL_BYTES, "big") + bytes.fromhex(run_id)
    blob = seal(identity, REPORT_DOMAIN, header + zlib.compress(text, 9))
    return blob if len(blob) <= MAX_REPORT_BYTES else None


def looks_like_report(blob: bytes) -> bool:
    """Whether a sealed record claims to be a report."""
    start = 1 + blob[0] + SIGNATURE_BYTES if blob else 0
    return blob[start : start + len(_MAGIC)] == _MAGIC


def report_place(blob: bytes) -> tuple[str, str, int]:
    """Signed record bytes -> (signer, run id, serial), without unpacking it.

    Raises:
        ProtocolError: too large, truncated, or not signed by the peer that it names.
    """
    signer, payload = open_sealed(REPORT_DOMAIN, blob, MAX_REPORT_BYTES)
    if len(payload) <= _HEADER_BYTES or not payload.startswith(_MAGIC):
        raise ProtocolError("truncated report")
    serial = int.from_bytes(payload[len(_MAGIC) : len(_MAGIC) + SERIAL_BYTES], "big")
    return signer, payload[_HEADER_BYTES - _RUN_BYTES : _HEADER_BYTES].hex(), serial


def unpack_report(blob: bytes) -> bytes:
    """The JSON of a report that `report_place` has accepted.

    Raises:
        ProtocolError: it does not unpack, or to more than the limit.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(blob[1 + blob[0] + SIGNATURE_BYTES + _HEADER_BYTES :], MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"report does not unpack: {error}") from None
    if not unpacker.eof:
        raise ProtocolError(f"report unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    return text
