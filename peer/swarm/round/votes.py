"""Certificates: the votes of one round, counted until two thirds of the roster have signed the same link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from peer.outer.round import RoundAborted
from peer.protocol.identity import verify
from peer.protocol.lineage import VOTE_DOMAIN, Link, quorum
from peer.swarm.round.inbox import RoundBuffers
from peer.system.clock import Clock

log = logging.getLogger(__name__)


async def collect_votes(
    buffers: RoundBuffers, link: Link, own: dict[str, str], clock: Clock, late_s: float,
    on_odd: Callable[[str, bool], None] = lambda *_: None,
) -> dict[str, str]:
    """Signatures by peer id, this peer's `own` among them; returns once two thirds agree.

    Votes that arrived before a suspend of this machine do not count: it would commit alone a round that the others may
    have abandoned, and drop it soon after. If they did commit it, they say so when they are asked.

    Args:
        late_s: after the deadline: this machine has slept, and the others have given the round up meanwhile.
        on_odd: called with a member that signed another link (False), or none that it could have signed (True).

    Raises:
        RoundAborted: too many disagree, or did not vote by the round's deadline.
    """
    signatures, members, link_id = dict(own), len(buffers.order), link.id
    waiting = {asyncio.ensure_future(_vote_of(buffers, peer_id, link_id, on_odd)) for peer_id in buffers.inboxes}
    try:
        while len(signatures) < quorum(members):
            if not waiting:
                raise RoundAborted("commit", _disagreement(buffers, link_id, signatures))
            left = max(0.0, buffers.deadline - clock())
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done or clock() > buffers.deadline + late_s:
                raise RoundAborted("commit", f"{len(signatures)} of {members} votes by the deadline")
            signatures.update(vote for task in done if (vote := task.result()) is not None)
    finally:
        for task in waiting:
            task.cancel()
    return signatures


async def _vote_of(
    buffers: RoundBuffers, peer_id: str, link_id: str, on_odd: Callable[[str, bool], None]
) -> tuple[str, str] | None:
    """(peer id, signature) if that member signed the same link, else None."""
    try:
        vote = await buffers.inboxes[peer_id].vote
    except RoundAborted as abort:
        log.info("no vote of %s: %s", peer_id, abort.reason)
        return None
    if not verify(peer_id, VOTE_DOMAIN, bytes.fromhex(vote.link_id), bytes.fromhex(vote.signature)):
        log.warning("%s signed its vote wrongly", peer_id)
        on_odd(peer_id, True)
        return None
    if vote.link_id != link_id:
        log.warning("%s computed another link: %s, not %s", peer_id, vote.link_id[:12], link_id[:12])
        on_odd(peer_id, False)
        return None
    return peer_id, vote.signature


def _disagreement(buffers: RoundBuffers, link_id: str, signatures: dict[str, str]) -> str:
    missing = [peer_id for peer_id in buffers.inboxes if peer_id not in signatures]
    return (
        f"{len(signatures)} of {len(buffers.order)} signed link {link_id[:12]}; "
        f"{quorum(len(buffers.order))} are needed; without {', '.join(missing)}"
    )
