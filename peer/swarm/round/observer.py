"""What an exchange tells the guard of a peer; nothing where there is no guard."""

from __future__ import annotations

from peer.outer.round import RoundAborted
from peer.swarm.round.inbox import Session
from peer.swarm.round.persistent_group import Standing
from peer.swarm.round.signatures import GroupsDifferError, Heard, Kept
from peer.swarm.trust.guard import Guard


class Watch:
    """Hands on what happens in the rounds of one peer.

    Args:
        guard: of this peer, if it has one.
    """

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard

    def joined(self, standing: Standing, round: int, session: Session) -> None:
        """All have joined a round of a standing group."""
        if self._guard is not None:
            self._guard.joined(standing.identifier, round, session.joins)

    def begins(self, session: Session) -> bool:
        """An exchange begins; -> whether what this peer receives shall be kept for audits."""
        if self._guard is None:
            return False
        self._guard.begins(session.order)
        return self._guard.keeps(len(session.order), session.me)

    def reduced(self, kept: Kept) -> None:
        """This peer has signed its part: from now on others may ask how it came to it, sooner than it has theirs."""
        if self._guard is not None:
            self._guard.reduced(kept)

    def heard(self, heard: Heard) -> None:
        """All parts have come and every signature is right."""
        if self._guard is not None:
            self._guard.heard(heard)

    def committed(self, session: Session) -> None:
        """The round has its certificate."""
        if self._guard is not None and session.heard is not None:
            self._guard.committed(session.heard)

    def saw(self, error: RoundAborted) -> None:
        """A member broke the protocol before this peer's eyes."""
        if self._guard is not None and error.culprit is not None:
            self._guard.conduct.saw(error.culprit, error.reason)

    def malformed(self, session: Session, error: RoundAborted) -> None:
        """A member's payload is malformed; if it sent another one to others, that can be shown."""
        self.saw(error)
        if self._guard is None or session.heard is None:
            return
        for peer_id in session.inboxes:
            if peer_id != error.culprit:
                self._guard.disagreed(session.heard, peer_id)

    def odd_vote(self, session: Session, peer_id: str, forged: bool) -> None:
        """A member signed another link than this peer, or none that it could have signed."""
        if self._guard is None or session.heard is None:
            return
        if forged:
            self._guard.conduct.saw(peer_id, "signed its vote wrongly")
        else:
            self._guard.disagreed(session.heard, peer_id)

    async def explain(self, standing: Standing | None, session: Session, differ: GroupsDifferError) -> RoundAborted:
        """Why this round cannot be; with the name of who joined it with two faces, if that can be shown."""
        culprit = None
        if self._guard is not None and standing is not None and standing.position is not None:
            round = standing.position.round
            culprit = await self._guard.two_faces(differ.remote, standing.identifier, round, session.joins)
        if culprit is None:
            return RoundAborted("exchange", differ.reason)
        return RoundAborted("exchange", f"{differ.reason}: {culprit} joined with two faces", culprit)
