"""What a committed round waited for: a member may make each round long, and yet never miss a deadline.

Each member says with its vote for whom it waited, and who delayed itself. One that reduces waits for all contributions,
so that one which had some of them late is not to blame for its shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from peer.protocol.wire import VoteMessage
from peer.swarm.round.giving_up import Lack

MULTIPLE, SHARE = 2.0, 0.15
EXCUSE = 0.5  # of what is allowed: else one could delay another just so far that that one is to blame


@dataclass(frozen=True)
class Waited:
    """What one member waited for.

    Attributes:
        lack: the first stage of which something came late, and of which members.
        delayed_by: the members whose contribution came so late that it explains a late shard.
        lost_s: by its own measure; 0 if no member was late.
    """

    lack: Lack | None = None
    delayed_by: frozenset[str] = frozenset()
    lost_s: float = 0.0

    @classmethod
    def said(cls, vote: VoteMessage) -> Waited:
        """What a member says that it waited for."""
        return cls(Lack.said(vote), frozenset(vote.delayed_by))

    def vote(self, link_id: str, signature: str) -> VoteMessage:
        """The vote that says so."""
        stage, names = (self.lack.stage, tuple(sorted(self.lack.names))) if self.lack is not None else (None, ())
        return VoteMessage.model_validate(
            {"link_id": link_id, "signature": signature, "lacks": stage, "lacking": names,
             "delayed_by": tuple(sorted(self.delayed_by))}
        )  # fmt: skip


class Lateness:
    """Measures for which members this peer waits, although they meet the deadline.

    What counts is what it costs: a large part of the time from round to round, and more than twice what most needed.

    Args:
        least_s: that any member may be late.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._ended: float | None = None

    def note(self, now: float, began: float, sent: Mapping[str, float], signed: Mapping[str, float]) -> Waited:
        """A round has all that it needs.

        Args:
            now, began: of this exchange.
            sent: when each other member's contribution was there.
            signed: when the shard that each member reduces was there, this peer's own among them.
        """
        since, self._ended = self._ended if self._ended is not None else began, now
        if len(sent) < 2:  # of two members, each could be the slow one
            return Waited()
        least_s, last = max(self._least_s, SHARE * (now - since)), max([began, *sent.values()])
        usual_s = median_low([began, *sent.values()]) - began
        allowed_s = max(least_s, MULTIPLE * usual_s)
        beyond = {peer_id: at - began - usual_s for peer_id, at in sent.items()}
        contributions = {peer_id: late_s for peer_id, late_s in beyond.items() if late_s > allowed_s}
        delayed_by = frozenset(peer_id for peer_id, late_s in beyond.items() if late_s > EXCUSE * allowed_s)
        usual_s = max(0.0, median_low(signed.values()) - last)
        beyond = {peer_id: signed[peer_id] - last - usual_s for peer_id in sent}
        shards = {peer_id: late_s for peer_id, late_s in beyond.items() if late_s > max(least_s, MULTIPLE * usual_s)}
        lack = Lack("contribution", frozenset(contributions)) if contributions else None
        lack = lack or (Lack("reduced", frozenset(shards)) if shards else None)
        lost_s = max(contributions.values(), default=0.0) + max(shards.values(), default=0.0)
        return Waited(lack, delayed_by, lost_s)
