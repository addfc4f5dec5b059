"""The group of a gossip round, drawn from the peers that this one sees. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median_low

from peer.outer.topology.topologies import Links, Topology

MeasuredLinks = Callable[[Sequence[str]], Links | None]
MOST_SKIPPED = 4  # a peer that is further behind downloads another peer's state when it restarts


def number_of(run_id: str, peer_id: str) -> int:
    """The number of a peer in a topology: the same on all peers, and independent of which others join or leave."""
    return int.from_bytes(hashlib.sha256(f"{run_id} {peer_id}".encode()).digest(), "big")


class GroupDraw:
    """Draws the groups of one run.

    Args:
        measured: the links between peers, where the topology draws by them.
    """

    def __init__(
        self, topology: Topology, seed: int, run_id: str, own_id: str, measured: MeasuredLinks | None = None
    ) -> None:
        self._topology, self._seed, self._run_id, self._own_id = topology, seed, run_id, own_id
        self._measured = measured

    def group(self, round: int, others: Iterable[str]) -> tuple[str, ...]:
        """This peer's group in a round, in the order of the members' numbers: the order in which all add up.

        Args:
            round: at least 1.
        """
        numbers = {number_of(self._run_id, peer_id): peer_id for peer_id in (*others, self._own_id)}
        links = None
        if self._measured is not None:  # measured links are indexed by the members' rank
            numbers = {place: numbers[number] for place, number in enumerate(sorted(numbers))}
            links = self._measured(list(numbers.values()))
        groups = self._topology.groups(round, list(numbers), self._seed, links)
        named = (tuple(numbers[number] for number in group) for group in groups)
        return next(group for group in named if self._own_id in group)


def round_after(own: int, others: Collection[int], last: int) -> int:
    """The number of a peer's next round.

    The one after its last, as others may wait for it there; but a peer that is further behind makes the round that most
    others have just made, or skips towards it: if its group is past that too, they say so.

    Args:
        others: theirs, as they claim; the median, so that a minority of false claims has no effect and a majority only
            a bounded one.
        last: of the run; no peer skips rounds to end it.
    """
    following = own + 1
    most = median_low(others) if others else 0
    return min(max(following, min(most, own + 1 + MOST_SKIPPED, last - 1)), last)
