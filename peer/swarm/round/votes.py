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
LAST_VOTE_SHARE = 0.1
"""Of the time that a round has taken: so long may a member make it longer by voting last."""


class VoteCount:
    """The signatures of one link by peer id, this peer's `own` among them; `close` ends the count.

    Args:
        on_odd: called with a member that signed another link (False), or none that it could have signed (True).
    """

    def __init__(
        self, buffers: RoundBuffers, link: Link, own: dict[str, str], clock: Clock,
        on_odd: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._buffers, self._link_id, self._clock = buffers, link.id, clock
        self.signatures = dict(own)
        votes = [_vote_of(buffers, peer_id, self._link_id, on_odd) for peer_id in buffers.inboxes]
        self._waiting = {asyncio.ensure_future(vote) for vote in votes}

    async def decide(self, late_s: float) -> None:
        """Wait until two thirds agree.

        Votes that arrived before a suspend of this machine do not count: it would commit alone a round that the others
        may have abandoned, and drop it soon after. If they did commit it, they say so when they are asked.

        Args:
            late_s: after the deadline: this machine has slept, and the others have given the round up meanwhile.

        Raises:
            RoundAborted: too many disagree, or did not vote by the round's deadline.
        """
        buffers, members = self._buffers, len(self._buffers.order)
        while len(self.signatures) < quorum(members):
            if not self._waiting:
                raise RoundAborted("commit", _disagreement(buffers, self._link_id, self.signatures))
            left = max(0.0, buffers.deadline - self._clock())
            came = await self._next(left)
            if came is None or self._clock() > buffers.deadline + late_s:
                raise RoundAborted("commit", f"{len(self.signatures)} of {members} votes by the deadline")
            self.signatures.update(came)

    async def all(self) -> dict[str, str]:
        """Wait for the other votes too, a tenth as long as the round has taken: fork choice weighs signers, and two
        parts of a swarm would each leave for the other if what each sees of its own branch lacked a signer.
        """
        now = self._clock()
        until = now + LAST_VOTE_SHARE * (now - self._buffers.times.began)
        while self._waiting and (came := await self._next(max(0.0, until - self._clock()))) is not None:
            self.signatures.update(came)
        return self.signatures

    async def _next(self, timeout_s: float) -> dict[str, str] | None:
        """The votes for this link among those that come next; None: none came."""
        done, self._waiting = await asyncio.wait(
            self._waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )  # fmt: skip
        return dict(vote for task in done if (vote := task.result()) is not None) if done else None

    def close(self) -> None:
        """Wait for no vote any longer."""
        for task in self._waiting:
            task.cancel()


async def _vote_of(
    buffers: RoundBuffers, peer_id: str, link_id: str, on_odd: Callable[[str, bool], None]
) -> tuple[str, str] | None:
    """(peer id, signature) if that member signed the same link, else None."""
    try:
        vote = await asyncio.shield(buffers.inboxes[peer_id].vote)  # a late one still says why it is late
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
