"""Control records: what the organiser of a run decides during it, signed with the manifest's key.

There is one record of a run. It says everything, so the newest serial alone counts. It expires so that a stranger can
show a newcomer only a recent one; the organiser's node renews it, and a peer that holds it obeys it until a newer one
comes.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.manifest import MAX_ROUNDS, Digest
from peer.protocol.records import (
    CLOCK_SKEW_S,
    MAX_RECORD_BYTES,
    Count,
    Seconds,
    dump_json,
    open_sealed,
    parse_json,
    seal,
)
from peer.protocol.spec import Message

CONTROL_DOMAIN = "control"
VALID_S = 30 * 86400.0  # from its signature until newcomers refuse it
MAX_ANNOUNCEMENT = 400
MAX_REVOKED = 256


def _printable(text: str) -> str:
    if not text.isprintable() or any(unicodedata.category(c) == "Cf" for c in text):
        raise ValueError("must be printable text on one line")
    return text


class Control(Message):
    """What holds in a run from now on.

    Attributes:
        serial: grows with each record of the run, across restarts; an older one never replaces a newer one.
        signed_at, expires_at: wall-clock seconds.
        state: `paused`: no rounds and no steps; `finished`: peers export and leave with the round `rounds_total`.
        rounds_total, tokens_total: where the run ends, in place of the manifest's; None: the manifest's hold.
        announcement: shown once by each peer.
        revoked: numbers of the invitations that are void.
    """

    most_items: ClassVar[int] = 1024

    run_id: Digest
    serial: Annotated[int, Field(ge=1, lt=2**53)]
    signed_at: Seconds
    expires_at: Seconds
    state: Literal["running", "paused", "finished"] = "running"
    rounds_total: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] | None = None
    tokens_total: Annotated[int, Field(ge=1, le=2**53)] | None = None
    announcement: Annotated[str, Field(max_length=MAX_ANNOUNCEMENT), AfterValidator(_printable)] = ""
    revoked: Annotated[tuple[Count, ...], Field(max_length=MAX_REVOKED)] = ()


def control_key(run_id: str) -> str:
    """DHT key under which the control record of a run lies."""
    return f"atoll/{run_id}/control"


def seal_control(identity: Identity, control: Control) -> bytes:
    """Control -> signed record bytes.

    Raises:
        ProtocolError: it does not fit a record.
    """
    blob = seal(identity, CONTROL_DOMAIN, dump_json(control))
    if len(blob) > MAX_RECORD_BYTES:
        raise ProtocolError(f"the control record is {len(blob)} bytes; a record holds {MAX_RECORD_BYTES}")
    return blob


def open_control(blob: bytes, run_id: str, organiser: str, now: float | None = None) -> Control:
    """Signed record bytes -> control.

    Args:
        now: wall-clock seconds; None: when it was signed does not matter.

    Raises:
        ProtocolError: malformed, of another run, not signed by `organiser`, expired, or of the future.
    """
    signer, payload = open_sealed(CONTROL_DOMAIN, blob)
    if signer != organiser:
        raise ProtocolError(f"control record of {signer}; the organiser of this run is {organiser}")
    control = parse_json(Control, payload)
    if control.run_id != run_id:
        raise ProtocolError(f"control record of run {control.run_id[:12]}, not {run_id[:12]}")
    if now is not None and control.expires_at <= now:
        raise ProtocolError(f"control record {control.serial} expired {now - control.expires_at:.0f} s ago")
    if now is not None and control.signed_at > now + CLOCK_SKEW_S:
        raise ProtocolError(f"control record {control.serial} is signed {control.signed_at - now:.0f} s in the future")
    return control
