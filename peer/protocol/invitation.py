"""Invitations: what lets a peer into a run that is not open, and the pass that it gets for one.

A token is signed by the organiser and names no key. The organiser's node binds it to the key of the peer that shows it
first, and signs a pass for that key, which the peer shows on every stream: other peers need nothing but the organiser's
peer id to check it, so that they check it while the organiser's node is away.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError, UserError
from peer.protocol.identity import Identity, verify
from peer.protocol.manifest import Digest, Name
from peer.protocol.records import MAX_RECORD_BYTES, Count, Seconds, dump_json, open_sealed, parse_json, seal
from peer.protocol.spec import Message

INVITATION_DOMAIN, PASS_DOMAIN = "invitation", "pass"
MAX_TOKEN_CHARS = 2048
MAX_PASS_CHARS = 128
MAX_REASON = 200  # characters with which a token is refused
ASK = "ask the organiser of the run for an invitation, and give it with --invitation TOKEN"


def invitation_name(run_id: str) -> str:
    """Stream handler of the organiser's node that gives passes for tokens."""
    return f"atoll/{run_id[:16]}/invitation"


class Invitation(Message):
    """One place in a run, for a name. `expires_at`: wall-clock seconds; the pass expires then, too."""

    run_id: Digest
    number: Annotated[Count, Field(lt=10**9)]
    name: Name
    expires_at: Seconds


def seal_invitation(identity: Identity, invitation: Invitation) -> str:
    """Invitation -> token."""
    return base64.urlsafe_b64encode(seal(identity, INVITATION_DOMAIN, dump_json(invitation))).decode().rstrip("=")


def open_invitation(token: str, run_id: str, organiser: str, now: float) -> Invitation:
    """Token -> invitation.

    Raises:
        UserError: damaged, of another run or organiser, or expired.
    """
    try:
        blob = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        signer, payload = open_sealed(INVITATION_DOMAIN, blob, MAX_RECORD_BYTES)
        invitation = parse_json(Invitation, payload)
    except (ProtocolError, binascii.Error, ValueError):
        raise UserError("the invitation is damaged: it is not what an organiser has signed",
                        "copy the whole token, which is one word") from None  # fmt: skip
    if signer != organiser or invitation.run_id != run_id:
        raise UserError(
            f"the invitation is for run {invitation.run_id[:16]} of {signer}; this is run {run_id[:16]} of {organiser}",
            "join the run that it is for, or " + ASK,
        )
    if invitation.expires_at <= now:
        hours = (now - invitation.expires_at) / 3600
        raise UserError(f"{invitation.name}'s invitation expired {hours:.1f} hours ago", ASK)
    return invitation


@dataclass(frozen=True)
class Pass:
    """An invitation that is bound to a peer's key. `expires_at`: whole wall-clock seconds."""

    number: int
    expires_at: int

    def sign(self, identity: Identity, run_id: str, peer_id: str) -> str:
        """What the peer shows."""
        signature = identity.sign(PASS_DOMAIN, self._statement(run_id, peer_id))
        return f"{self.number}.{self.expires_at}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"

    @classmethod
    def read(cls, text: str, run_id: str, peer_id: str, organiser: str) -> Pass:
        """What a peer has shown; says nothing of the time.

        Raises:
            ProtocolError: the organiser has not signed it for this run and this peer.
        """
        number, _, rest = text.partition(".")
        expires_at, _, signature = rest.partition(".")
        try:
            shown = cls(int(number), int(expires_at))
            signed = base64.b64decode(signature + "==", altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise ProtocolError(f"{peer_id} shows no invitation") from None
        if not verify(organiser, PASS_DOMAIN, shown._statement(run_id, peer_id), signed):
            raise ProtocolError(f"{peer_id} shows a pass that the organiser has not signed for it")
        return shown

    def _statement(self, run_id: str, peer_id: str) -> bytes:
        return f"{run_id} {self.number} {self.expires_at} {peer_id}".encode()
