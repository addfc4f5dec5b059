"""What a committed round waited for: a member may make each round long, and yet never miss a deadline.

Each member says with its vote for whom it waited, and who delayed it, and the latter also when it gives a round up. One
that reduces waits for all contributions, and none begins without all joins: a member that had one of them late is not
to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from peer.protocol.wire import VoteMessage
from peer.protocol.word import Stage
from peer.swarm.round.arrivals import Arrivals

MULTIPLE, SHARE = 2.0, 0.15
EXCUSE = 0.5  # of what is allowed: else one could delay another just so far that that one is to blame


@dataclass(frozen=True)
class Waited:
    """What one member waited for.

    Attributes:
        contributions, shards: seconds beyond the usual, of the members whose contribution or reduced shard was late; of
            what another member says, no seconds.
        delayed_by: the members that explain why this member was late: see `Lateness.delayed_by`.
        joins: seconds beyond the usual, of the members whose join was late; no word says it.
    """

    contributions: Mapping[str, float] = field(default_factory=dict)
    shards: Mapping[str, float] = field(default_factory=dict)
    delayed_by: frozenset[str] = frozenset()
    joins: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def said(cls, vote: VoteMessage) -> Waited:
        """What a member says that it waited for."""
        contributions, shards = (dict.fromkeys(names, 0.0) for names in (vote.late_contributions, vote.late_shards))
        return cls(contributions, shards, frozenset(vote.delayed_by))

    @property
    def late(self) -> tuple[tuple[Stage, Mapping[str, float]], ...]:
        """By the stage of an exchange."""
        return ("contribution", self.contributions), ("reduced", self.shards)

    def vote(self, link_id: str, signature: str) -> VoteMessage:
        """The vote that says so."""
        return VoteMessage(
            link_id=link_id, signature=signature, late_contributions=tuple(sorted(self.contributions)),
            late_shards=tuple(sorted(self.shards)), delayed_by=tuple(sorted(self.delayed_by)),
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
        self._failed = False

    def failed(self) -> None:
        """A round of this peer came to nothing: the time from the last one to the next is no usual one."""
        self._failed = True

    def note(self, now: float, times: Arrivals) -> Waited:
        """A round has all that it needs, by now."""
        delayed_by, began = self.delayed_by(now, times), times.began
        sent, signed, joined = times.sent, times.signed, times.joined
        since, self._ended, self._failed = self._ended if self._ended is not None else began, now, False
        if len(sent) < 2:  # of two members, each could be the slow one
            return Waited()
        least_s, last = max(self._least_s, SHARE * (now - since)), max([began, *sent.values()])
        usual_s = median_low([began, *sent.values()]) - began
        beyond = {peer_id: at - began - usual_s for peer_id, at in sent.items()}
        most_s = max(least_s, MULTIPLE * usual_s)
        contributions = {peer_id: late_s for peer_id, late_s in beyond.items() if late_s > most_s}
        beyond = {peer_id: at - median_low(joined.values()) for peer_id, at in joined.items()}
        joins = {peer_id: late_s for peer_id, late_s in beyond.items() if late_s > least_s}
        usual_s = max(0.0, median_low(signed.values()) - last)
        beyond = {peer_id: signed[peer_id] - last - usual_s for peer_id in sent}
        most_s = max(least_s, MULTIPLE * usual_s)
        shards = {peer_id: late_s for peer_id, late_s in beyond.items() if late_s > most_s}
        return Waited(contributions, shards, delayed_by, joins)

    def delayed_by(self, now: float, times: Arrivals) -> frozenset[str]:
        """The members that explain why this peer is late itself, as far as all has come by now: those whose join came
        when most others had begun without it being late there, and the one whose contribution came last. A member that
        all had to wait for explains nothing, although its join was late.
        """
        began, sent, joined = times.began, times.sent, times.joined
        if len(sent) < 2:
            return frozenset()
        since = began if self._failed or self._ended is None else self._ended
        excused_s = EXCUSE * max(self._least_s, SHARE * (now - since))
        found, last = set[str](), max(sent, key=lambda peer_id: sent[peer_id])
        if sent[last] - median_low([began, *sent.values()]) > excused_s:
            found.add(last)
        for peer_id, at in joined.items():
            begun = sum(there < at for other, there in times.sealed.items() if other != peer_id)
            if 2 * begun > len(joined) - 1 and at - median_low(joined.values()) > excused_s:
                found.add(peer_id)
        return frozenset(found)
