"""What an exchange reports of its rounds: the guard of a peer observes them, and names the culprit if it can."""

from __future__ import annotations

from typing import Protocol

from peer.outer.round import RoundAborted
from peer.protocol.evidence import TwoWords
from peer.swarm.round.giving_up import Lack
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.persistent_group import PersistentGroup
from peer.swarm.round.signatures import GroupsDifferError, ReducedShards, ReductionProof


class RoundObserver(Protocol):
    """Hears what happens in the rounds of one peer, and delays none of them."""

    def joined(self, persistent: PersistentGroup, round: int, buffers: RoundBuffers) -> None:
        """All have joined a round of a persistent group."""

    def begins(self, buffers: RoundBuffers) -> bool:
        """An exchange begins; -> whether what this peer receives shall be kept for audits."""

    def reduced(self, kept: ReductionProof) -> None:
        """This peer has signed its shard: from now on others may ask how it came to it, sooner than it has theirs."""

    def heard(self, heard: ReducedShards) -> None:
        """All shards have come and every signature is right."""

    def committed(self, buffers: RoundBuffers) -> None:
        """The round has its certificate, and all votes that came have been heard."""

    def gave_up(self, persistent: PersistentGroup, member: str, lack: Lack | None, lost_s: float) -> None:
        """A member, perhaps this peer, gives up and says what it lacks; this peer has lost so many seconds by it."""

    def explained(self, group: str, member: str, lack: Lack) -> None:
        """A member that said nothing to this peer as a round failed has told others what it lacked."""

    def equivocated(self, finding: TwoWords) -> None:
        """A member has given two reasons to two members."""

    def cost(self, peer_id: str, seconds: float) -> None:
        """A round took so much longer because of this member, and was committed."""

    def saw(self, error: RoundAborted) -> None:
        """A member broke the protocol before this peer's eyes."""

    def malformed(self, buffers: RoundBuffers, error: RoundAborted) -> None:
        """A member's payload is malformed; if it sent another one to others, that can be shown."""

    def odd_vote(self, buffers: RoundBuffers, peer_id: str, forged: bool) -> None:
        """A member signed another link than this peer, or none that it could have signed."""

    async def explain(
        self, persistent: PersistentGroup | None, buffers: RoundBuffers, differ: GroupsDifferError
    ) -> RoundAborted:
        """Why this round cannot be; with the name of the member that equivocated, if that can be shown."""


class Unobserved:
    """The observer of a peer without a guard."""

    def joined(self, persistent: PersistentGroup, round: int, buffers: RoundBuffers) -> None: ...

    def begins(self, buffers: RoundBuffers) -> bool:  # noqa: ARG002
        return False

    def reduced(self, kept: ReductionProof) -> None: ...

    def heard(self, heard: ReducedShards) -> None: ...

    def committed(self, buffers: RoundBuffers) -> None: ...

    def gave_up(self, persistent: PersistentGroup, member: str, lack: Lack | None, lost_s: float) -> None: ...

    def explained(self, group: str, member: str, lack: Lack) -> None: ...

    def equivocated(self, finding: TwoWords) -> None: ...

    def cost(self, peer_id: str, seconds: float) -> None: ...

    def saw(self, error: RoundAborted) -> None: ...

    def malformed(self, buffers: RoundBuffers, error: RoundAborted) -> None: ...

    def odd_vote(self, buffers: RoundBuffers, peer_id: str, forged: bool) -> None: ...

    async def explain(
        self, persistent: PersistentGroup | None, buffers: RoundBuffers, differ: GroupsDifferError  # noqa: ARG002
    ) -> RoundAborted:
        return RoundAborted("exchange", differ.reason)
