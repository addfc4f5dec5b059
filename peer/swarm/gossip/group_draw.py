"""Whom a gossip round is with, from what this peer sees of the swarm. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from statistics import median_low

from peer.outer.topology.topologies import Topology

MOST_SKIPPED = 4  # who is further behind and starts anew takes another peer's state


def number_of(run_id: str, peer_id: str) -> int:
    """The number that a topology knows a peer by: the same on all peers, and whoever comes or goes changes no other."""
    return int.from_bytes(hashlib.sha256(f"{run_id} {peer_id}".encode()).digest(), "big")


class GroupDraw:
    """Draws the groups of one run.

    Args:
        topology, seed: of the run.
        run_id: whose numbers.
        own_id: this peer.
    """

    def __init__(self, topology: Topology, seed: int, run_id: str, own_id: str) -> None:
        self._topology, self._seed, self._run_id, self._own_id = topology, seed, run_id, own_id

    def group(self, round: int, others: Iterable[str]) -> tuple[str, ...]:
        """This peer's group in a round, in the order of the members' numbers: the order in which all add up.

        Args:
            round: at least 1.
            others: who else is there, as far as this peer sees.
        """
        members = {number_of(self._run_id, peer_id): peer_id for peer_id in (*others, self._own_id)}
        own = number_of(self._run_id, self._own_id)
        groups = self._topology.groups(round, list(members), self._seed, None)
        return tuple(members[number] for number in next(group for group in groups if own in group))


def round_after(own: int, others: Collection[int], last: int) -> int:
    """The number of a peer's next round.

    The one after its last, as others may wait for it there; but who is further behind makes the round that most others
    have just made, or comes nearer to it: if its group is past that too, they say so.

    Args:
        own: its last round.
        others: theirs, by their own account; the median, so that few liars do not carry anybody away, and many not far.
        last: of the run; nobody skips rounds to end it.
    """
    following = own + 1
    most = median_low(others) if others else 0
    return min(max(following, min(most, own + 1 + MOST_SKIPPED, last - 1)), last)
