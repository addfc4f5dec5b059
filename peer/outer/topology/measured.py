"""What all peers of a run take as its links, from what each of them says that it has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high

from peer.outer.topology.topologies import Links

MOST_MOVED = 2.0  # by which one end can lower a link that is limited by its ends

Said = Sequence[Mapping[int, float]]


def agreed_links(said: Said) -> Links | None:
    """The links that follow from these claims: of each two members the lower of what both ends say.

    A link never counts as slower than half of the higher claim, if other peers measured that rate at both ends. So a
    false claim makes no link faster than the other end and the other peers measure, nor slower than half of that. A
    link that neither end has measured is as slow as the slowest.

    Args:
        said: [i][j]: bytes/s between members i and j, as i says; some may be missing.

    Returns:
        None where nothing is said: then all links count as equal.
    """
    members = range(len(said))
    heard: list[dict[int, float]] = [{} for _ in members]  # [j][i]: what i says of its line to j
    for i, word in enumerate(said):
        for j, rate in word.items():
            heard[j][i] = rate
    rates = [[_between(heard, i, j) if i != j else None for j in members] for i in members]
    known = [rate for row in rates for rate in row if rate is not None]
    if not known:
        return None
    slowest = min(known)
    pair = tuple(tuple(slowest if rate is None else rate for rate in row) for row in rates)
    fastest = tuple(max(row) for row in pair)
    return Links(up=fastest, down=fastest, pair=pair)


def _between(heard: Said, one: int, other: int) -> float | None:
    ends = [heard[j][i] for i, j in ((one, other), (other, one)) if i in heard[j]]
    if not ends:
        return None
    words = (
        [rate for member, rate in heard[end].items() if member not in (one, other)] for end in (one, other)
    )
    limits = [median_high(own) for own in words if own]
    if len(ends) == 1:
        return min([*ends, *limits])
    return max(min(ends), min([max(ends), *limits]) / MOST_MOVED if limits else 0.0)
