"""For how long a peer gets no seat after failures: what peers, and pairs of them, owe.

After a failure a peer has a debt of `FACTOR` times the seconds that it cost, which passes with time. One that fails
again before is refused for the rest of it, and longer each time, doubled, until it was in a committed round. A pair
has such a debt as well. So that a member cannot stall its victims in turn, what else one of the two has cost counts
twice in it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from peer.swarm.runtime.expiring import BoundedMap
from peer.system.clock import Clock

FACTOR = 7.0  # so that a peer may cost a seventh of the time
ELSEWHERE = 2.0  # times as much counts what a member of a pair has cost with others
MAX_REMEMBERED = 8192  # a member may quarrel with 63 others at once
MAX_DOUBLINGS = 20
Peers = frozenset[str]  # one, or a pair


@dataclass(frozen=True)
class Loss:
    """What one failure cost.

    Attributes:
        number: of the failure.
        alone: a network that is cut explains it as well, so that it counts in no other debt.
        committed: the round did not fail; a newcomer too may make one long before it is refused.
    """

    number: int
    seconds: float
    alone: bool = False
    committed: bool = False

    @property
    def elsewhere_s(self) -> float:
        """What it counts in other debts."""
        return 0.0 if self.alone else self.seconds


@dataclass
class _Debt:
    """When it will have passed, the failures since a committed round, and the dearest loss while it lasts."""

    until: float = 0.0
    failures: int = 0
    dearest: Loss = Loss(-1, 0.0)


class Debts:
    """What peers and pairs owe.

    Args:
        longest_s: that a debt may last.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock, self._longest_s = clock, longest_s
        self._debts: BoundedMap[Peers, _Debt] = BoundedMap(MAX_REMEMBERED)

    def __len__(self) -> int:
        return len(self._debts)

    def left_s(self, peers: Peers) -> float:
        """Until the debt has passed."""
        debt = self._debts.get(peers)
        return max(0.0, debt.until - self._clock()) if debt is not None else 0.0

    def made_round(self, members: Collection[str]) -> None:
        """What fails next is no longer in a row."""
        for peers, debt in self._debts.items():
            if peers.issubset(members):
                debt.failures = 0

    def elsewhere_s(self, several: Collection[Peers]) -> dict[Peers, float]:
        """Of a peer, or of the one of each pair that has cost more: its losses in other debts, each failure once."""
        now, losses = self._clock(), dict[str, list[tuple[Peers, _Debt]]]()
        for peers, debt in self._debts.items():
            for peer_id in peers if debt.until > now else ():
                losses.setdefault(peer_id, []).append((peers, debt))

        def of(one: str, these: Peers) -> float:
            others = [debt.dearest for peers, debt in losses.get(one, ()) if peers != these]
            return sum({loss.number: loss.elsewhere_s for loss in others}.values())

        return {these: max(of(one, these) for one in these) for these in several}

    def charge(self, peers: Peers, loss: Loss, elsewhere_s: float, *, again: bool) -> float:
        """Add to a debt. -> seconds of refusal.

        Args:
            elsewhere_s: of one of a pair, or of the peer: see the method.
            again: it is not the first time, whatever this book remembers.
        """
        now = self._clock()
        debt = self._debts[peers] = self._debts.get(peers) or _Debt()  # the last to be forgotten
        owed = max(0.0, debt.until - now)
        own = FACTOR * 2.0 ** min(debt.failures, MAX_DOUBLINGS) * loss.seconds
        cost = own + FACTOR * ELSEWHERE * elsewhere_s
        refused_s = owed + (own if len(peers) == 1 else cost) if again or debt.failures else owed
        debt.until, debt.failures = now + min(owed + cost, self._longest_s), debt.failures + 1
        if owed == 0.0 or loss.elsewhere_s >= debt.dearest.elsewhere_s:  # a short failure hides no long one
            debt.dearest = loss
        return min(refused_s, self._longest_s)
