"""How a peer gets its pass into an invited run: from its folder, or from the organiser's node for a token."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from peer.errors import ProtocolError, UserError, in_words
from peer.protocol.invitation import (
    ASK,
    MAX_PASS_CHARS,
    MAX_REASON,
    MAX_TOKEN_CHARS,
    invitation_name,
    open_invitation,
)
from peer.protocol.wire import Kind
from peer.swarm.net.gate import Gate
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.system.output_files import replace_file

log = logging.getLogger(__name__)
FILE_NAME = "pass.txt"


async def enter(node: Node, gate: Gate, run_id: str, organiser: str, folder: Path, token: str) -> None:
    """Get the pass of this peer, and keep it in the folder of the run's history.

    Args:
        token: the invitation; empty: there is none, or it has been used before.

    Raises:
        UserError: no invitation, one that is void or another peer's, or the organiser's node is away.
    """
    path, problem = folder / FILE_NAME, ""
    try:
        kept = path.read_bytes()[:MAX_PASS_CHARS].decode("ascii", errors="replace")
        gate.admit(node.peer_id, kept)
        gate.own = kept
        return
    except OSError:
        pass
    except ProtocolError as error:
        problem = str(error)
    if not token:
        raise UserError(f"this run is for invited peers: {problem or 'you gave no invitation'}", ASK)
    open_invitation(token, run_id, organiser, time.time())
    text = await _ask(node, run_id, organiser, token)
    try:
        gate.admit(node.peer_id, text)
    except ProtocolError as error:
        raise UserError(f"the organiser's node gave a pass that is void: {error}", ASK) from None
    gate.own = text
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        log.warning("%s is not kept, so that the next start asks again: %s", path, error.strerror)


async def _ask(node: Node, run_id: str, organiser: str, token: str) -> str:
    hint = "a first entry needs the organiser's node; try again when it is online"
    try:
        stream = await node.open(organiser, invitation_name(run_id), "history")
        try:
            await stream.send(Kind.REQUEST, token.encode()[:MAX_TOKEN_CHARS])
            limits = {Kind.PASS: MAX_PASS_CHARS, Kind.REJECT: MAX_REASON}
            kind, body = await stream.receive(limits, timeout_s=node.timing.checkpoint_answer_s)
        finally:
            stream.close()
    except (StreamClosedError, ProtocolError) as error:
        raise UserError(f"the organiser's node gives no pass: {in_words(error)}", hint) from None
    text = body.decode(errors="replace")
    if kind is Kind.REJECT:
        raise UserError(f"the organiser's node refuses the invitation: {text}", ASK)
    return text
