"""What matchmaking needs from its own peer."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from peer.outer.round import Group, RoundAborted
from peer.protocol.lineage import Position


class Contributions(Protocol):
    """This peer's contributions; a `ContributionSlot` implements it."""

    called: bool  # rounds begin when a peer calls for one, and at no other time

    @property
    def tokens_per_s(self) -> float:
        """Trained, as the trainer's last report says."""

    def due_in_s(self) -> float:
        """Seconds until the next contribution would be due anyway."""

    def halfway(self) -> bool:
        """Whether at least half of that contribution is trained."""

    def request_now(self) -> None:
        """Ask for a contribution now, with the current progress."""


class LocalPeer(Protocol):
    """This peer, as seen by itself; `LineageRounds` implements it."""

    @property
    def slot(self) -> Contributions:
        """Its contributions."""

    @property
    def client(self) -> bool:
        """Whether this machine accepts no connection: others cannot wait at it."""

    def position(self) -> Position:
        """Round and lineage id now."""

    def last_rosters(self, count: int) -> list[tuple[str, ...]]:
        """The members of so many rounds up to its position, in order."""

    def followed(self, members: Set[str]) -> bool:
        """Whether peers at its position would follow a round that these have made without them, or these, and perhaps
        others, have waited for such peers before, and none came.
        """

    def taking_part(self) -> bool:
        """Whether it makes rounds: False while joining or when finished, and invitations are then declined."""

    def persistent_members(self) -> frozenset[str]:
        """The members of the persistent group; empty if there is none."""

    def newcomer(self, peer_id: str) -> bool:
        """Whether a peer is in probation although others are not: the same for all that are at one lineage id."""

    def refuses(self, peer_id: str) -> bool:
        """Whether that peer gets no seat in groups with this one."""

    def cost(self, peer_id: str, seconds: float) -> None:
        """That peer has cost this one so much time."""

    def ahead(self) -> str | None:
        """A peer whose chain has been looked at, and that this one shall follow: no claim alone holds up a round."""

    def nudge(self, donor: str, lineage_id: str) -> None:
        """A peer on a heavier lineage has shown itself: catch up from it."""

    def expects(self, group: Group) -> None:
        """A group has formed, of which members may open streams before this peer begins its round."""

    def decline(self, group: Group, abort: RoundAborted) -> None:
        """Tell the members of a group that has formed that its round does not begin, and why."""
