"""Invitations of a run: the organiser's list of them, and the node's answer to those who show one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from peer.errors import ProtocolError, UserError
from peer.protocol.identity import Identity
from peer.protocol.invitation import (
    MAX_REASON,
    MAX_TOKEN_CHARS,
    Invitation,
    Pass,
    invitation_name,
    open_invitation,
    seal_invitation,
)
from peer.protocol.manifest import Name, PeerIdText, Spec
from peer.protocol.records import Seconds, SpecT, dump_json, parse_json
from peer.protocol.wire import Kind
from peer.swarm.state.run_control import RunControl
from peer.system.output_files import replace_file

if TYPE_CHECKING:  # hivemind brings torch, which a command that signs a file need not wait for
    from peer.swarm.net.node import Node
    from peer.swarm.net.stream import FrameStream

log = logging.getLogger(__name__)
LIST_NAME, BOUND_NAME = "invitations.json", "invited.json"
MAX_INVITATIONS = 10_000


class Invited(Spec):
    """One line of the list."""

    name: Name
    expires_at: Seconds


class InvitationList(Spec):
    """Those of a run; the first has number 1."""

    invitations: Annotated[tuple[Invited, ...], Field(max_length=MAX_INVITATIONS)] = ()


class Bound(Spec):
    """Peer ids by the number of the invitation that they have used."""

    peers: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], PeerIdText] = Field(default_factory=dict)


class InvitationRegistry:
    """Who is invited, and who has come. The organiser's commands write the first, the node writes the second.

    Args:
        folder: of the run's history.
        clock: wall-clock seconds.
    """

    def __init__(
        self, folder: Path, run_id: str, identity: Identity, clock: Callable[[], float] = time.time
    ) -> None:
        self._list_path, self._bound_path = folder / LIST_NAME, folder / BOUND_NAME
        self._run_id, self._identity, self._clock = run_id, identity, clock

    @property
    def invitations(self) -> tuple[Invited, ...]:
        """In order of their numbers, which begin with 1."""
        return _read(self._list_path, InvitationList).invitations

    def invite(self, name: str, valid_s: float) -> str:
        """A token for a new name.

        Raises:
            UserError: the name is taken, or not a name; the list is full, or cannot be written.
        """
        before, now = self.invitations, self._clock()
        if any(one.name == name for one in before):
            raise UserError(f"{name} is invited already", "choose another name, such as " + name[:60] + "-2")
        if len(before) >= MAX_INVITATIONS:
            raise UserError(f"the run has {MAX_INVITATIONS} invitations, the most that there can be")
        try:
            invitation = Invitation(run_id=self._run_id, number=len(before) + 1, name=name, expires_at=now + valid_s)
        except ValueError:
            raise UserError(f"{name!r} is not a name", "use a to z, 0 to 9, '.', '_' and '-', at most 64") from None
        invited = Invited(name=name, expires_at=invitation.expires_at)
        _write(self._list_path, InvitationList(invitations=(*before, invited)))
        return seal_invitation(self._identity, invitation)

    def number_of(self, name: str) -> int:
        """Of a name's invitation. Raises UserError where there is none."""
        names = [one.name for one in self.invitations]
        if name not in names:
            known = ", ".join(names[:20]) or "none so far"
            raise UserError(f"{name} is not invited", f"invited are: {known}")
        return names.index(name) + 1

    def bound(self) -> dict[int, str]:
        """Peer ids by the number of the invitation that they have used."""
        return {int(number): peer_id for number, peer_id in _read(self._bound_path, Bound).peers.items()}

    def bind(self, token: str, peer_id: str, control: RunControl) -> str:
        """The pass of a peer that shows a token.

        Raises:
            UserError: the token is not of this run, expired, revoked, or another peer's.
        """
        invitation = open_invitation(token, self._run_id, self._identity.peer_id, self._clock())
        if control.revokes(invitation.number):
            raise UserError(f"{invitation.name}'s invitation has been revoked")
        bound = self.bound()
        owner = bound.get(invitation.number, peer_id)
        if owner != peer_id:
            raise UserError(f"{invitation.name}'s invitation is used by another key, {owner}")
        if invitation.number not in bound:
            peers = {str(number): one for number, one in {**bound, invitation.number: peer_id}.items()}
            _write(self._bound_path, Bound(peers=peers))
        return Pass(invitation.number, int(invitation.expires_at)).sign(self._identity, self._run_id, peer_id)

    async def serve(self, node: Node, control: RunControl) -> None:
        """Answer those who show a token."""

        async def answer(stream: FrameStream) -> None:
            _, token = await stream.receive({Kind.REQUEST: MAX_TOKEN_CHARS}, timeout_s=node.timing.first_frame_s)
            try:
                text = self.bind(token.decode("ascii", errors="replace"), stream.remote, control)
                log.info("%s has entered", stream.remote)
                await stream.send(Kind.PASS, text.encode())
            except UserError as error:
                log.warning("%s is not let in: %s", stream.remote, error.what)
                await stream.send(Kind.REJECT, error.what.encode()[:MAX_REASON])

        await node.serve(invitation_name(self._run_id), "history", answer)


def _read(path: Path, schema: type[SpecT]) -> SpecT:
    try:
        return parse_json(schema, path.read_bytes())
    except FileNotFoundError:
        return schema()
    except (OSError, ProtocolError) as error:
        raise UserError(f"{path} cannot be read: {error}", "restore it from a backup") from None


def _write(path: Path, content: Spec) -> None:
    try:
        replace_file(path, dump_json(content))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "check the disk") from None
