"""What one gossip round comes to, before it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peer.outer.record import RoundRecord
from peer.protocol.wire import roster_digest
from peer.swarm.gossip.mixing import Mixture

MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class GossipOutcome:
    """A mixture, whose it is, and why not all of the drawn are its members.

    Attributes:
        members, weights: of the members that took part, this peer included.
        phase, reason, culprit: as in `RoundRecord`, if a drawn member did not.
    """

    round: int
    drawn: tuple[str, ...]
    members: tuple[str, ...]
    weights: tuple[int, ...]
    mixture: Mixture
    phase: str | None = None
    reason: str | None = None
    culprit: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def record(self, run_id: str, state_digest: str, seconds: Mapping[str, float]) -> RoundRecord:
        """Of the round, once it is applied: `state_digest` is this peer's own state after it."""
        return RoundRecord(
            status="committed", round=self.round, lineage_id=state_digest, state_digest=state_digest,
            group_id=roster_digest(run_id, self.round, self.members), drawn=self.drawn, members=self.members,
            weights=self.weights, phase=self.phase, culprit=self.culprit, seconds=dict(seconds),
            reason=self.reason[:MAX_REASON_CHARS] if self.reason is not None else None,
            cosine=self.mixture.cosine, dropped=self.mixture.drops,
        )  # fmt: skip
