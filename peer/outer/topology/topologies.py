"""Which peers average with each other in a round: the same answer on every peer that has the same arguments.

Members are numbers at least 0 that all peers agree on; the order in which they are listed does not matter.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from peer.errors import UserError
from peer.outer.topology.matching import greedy_matching, maximum_matching
from peer.outer.topology.members import Edge, Grouping, distinct, partition, shuffled, with_singles


@dataclass(frozen=True, kw_only=True)
class Links:
    """Measured bandwidth, in bytes per second; member i is at index i.

    Attributes:
        up: what each member can send.
        down: what each member can receive.
        pair: optionally, what member i can send to member j at [i][j]; the diagonal is not read.
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    pair: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if len(self.up) != len(self.down):
            raise UserError(f"links: {len(self.up)} up and {len(self.down)} down: must be as many", "one of each")
        rows = self.pair or ()
        if self.pair is not None and any(len(row) != len(self.up) for row in (rows, *rows)):
            raise UserError(f"links.pair: must be {len(self.up)} rows of {len(self.up)}", "one row per sender")
        off_diagonal = [rate for i, row in enumerate(rows) for j, rate in enumerate(row) if i != j]
        for rate in (*self.up, *self.down, *off_diagonal):
            if not (math.isfinite(rate) and rate > 0.0):
                raise UserError(f"links: {rate} bytes/s: must be finite and above 0", "omit pairs without a link")

    @property
    def size(self) -> int:
        """How many members it describes."""
        return len(self.up)

    def both_ways(self, member: int) -> float:
        """Bytes per second that `member` can send while it receives as many."""
        return min(self.up[member], self.down[member])

    def between(self, members: Sequence[int]) -> NDArray[np.float64]:
        """Bytes per second that each two of R members can send to each other at the same time, [R, R]."""
        both_ways = np.array([self.both_ways(member) for member in members], np.float64)
        slowest = np.minimum(both_ways[:, None], both_ways)
        if self.pair is None:
            return slowest
        rates = np.array(self.pair, np.float64)[np.ix_(members, members)]
        return np.minimum(slowest, np.minimum(rates, rates.T))



class Topology(ABC):
    """Members -> the groups that average in a round.

    Attributes:
        measures: it draws by what members have measured of the lines between them.
    """

    measures: ClassVar[bool] = False

    @abstractmethod
    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Grouping:
        """A partition of `members`; deterministic. A peer alone in its group keeps its own result.

        Args:
            round: at least 0.
            members: distinct numbers at least 0, in any order.
            seed: shared by the run.
            links: measured bandwidth, or None where nothing was measured; then all links count as equal.

        Returns:
            Ascending groups, in the order of their first members.
        """


@dataclass(frozen=True, kw_only=True)
class AllPeers(Topology):
    """One group of all: the exact mean in one round."""

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Grouping:  # noqa: ARG002
        present = _checked(round, members)
        return [tuple(present)] if present else []


@dataclass(frozen=True, kw_only=True)
class RandomPairs(Topology):
    """Consecutive pairs of a permutation seeded by (seed, round) (NoLoCo, arXiv 2506.10911).

    Attributes:
        odd: with an odd number of members the last one stays "alone", or joins the last pair as a "triple".
    """

    odd: Literal["alone", "triple"] = "alone"

    def __post_init__(self) -> None:
        if self.odd not in ("alone", "triple"):
            raise UserError(f"odd={self.odd!r}: must be 'alone' or 'triple'", "'alone' skips a round of one member")

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Grouping:  # noqa: ARG002
        order = shuffled(_checked(round, members), "pairs", seed, round)
        drawn = [order[at : at + 2] for at in range(0, len(order), 2)]
        if self.odd == "triple" and len(order) % 2 and len(drawn) > 1:
            drawn[-2:] = [drawn[-2] + drawn[-1]]
        return partition(drawn)


@dataclass(frozen=True, kw_only=True)
class Groups(Topology):
    """Lines of a grid, along another axis each round (Moshpit SGD, arXiv 2103.03239).

    The R members stand, in an order drawn once from the seed, on a grid of d = ceil(log_size R) axes no longer than
    `size`, the smallest that holds them. Round r groups the members that differ in coordinate r mod d alone. If the
    grid is full (R is a product of d numbers up to `size`, a power of it say), any d rounds of plain averaging yield
    the exact mean of all; else each round keeps the mean and shrinks the spread.

    Attributes:
        size: members per group at most.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise UserError(f"group_size={self.size}: must be at least 2", "smaller groups never mix")

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Grouping:  # noqa: ARG002
        order = shuffled(_checked(round, members), "grid", seed)
        sides = self.sides(len(order))
        axis = round % max(1, len(sides))
        stride, side = math.prod(sides[:axis]), (sides[axis] if sides else 1)
        lines: dict[int, list[int]] = {}
        for place, member in enumerate(order):
            lines.setdefault(place - place // stride % side * stride, []).append(member)
        return partition(lines.values())

    def sides(self, num_members: int) -> tuple[int, ...]:
        """Lengths of the grid's axes; none for fewer than two members."""
        num_axes = next(axes for axes in itertools.count() if self.size**axes >= num_members)
        grids = itertools.combinations_with_replacement(range(self.size, 1, -1), num_axes)
        return min((sides for sides in grids if math.prod(sides) >= num_members), key=math.prod)


@dataclass(frozen=True, kw_only=True)
class Neighbours(Topology):
    """A random matching of a sparse graph's edges each round: the pair events of A2CiD2 (arXiv 2306.08289).

    Members stand on the graph in ascending order. Edges are drawn without replacement in an order seeded by (seed,
    round) and taken if both ends are free, so that no edge between two members that stay alone is left.

    Attributes:
        graph: "ring"; or "torus", of as many rows as the largest divisor of R up to sqrt(R): a ring if R is prime.
    """

    graph: Literal["ring", "torus"]

    def __post_init__(self) -> None:
        if self.graph not in ("ring", "torus"):
            raise UserError(f"graph={self.graph!r}: must be 'ring' or 'torus'", "for a complete graph use RandomPairs")

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Grouping:  # noqa: ARG002
        present = _checked(round, members)
        return with_singles(present, greedy_matching(shuffled(self.edges(present), self.graph, seed, round)))

    def edges(self, members: Sequence[int]) -> list[Edge]:
        """All edges (lower, higher), sorted: what `chi` takes."""
        present = distinct(members)
        count = len(present)
        rows = 1
        if self.graph == "torus":
            rows = max((rows for rows in range(1, math.isqrt(count) + 1) if count % rows == 0), default=1)
        columns = count // rows
        found = set()
        for row, column in itertools.product(range(rows), range(columns)):
            for across, down in ((1, 0), (0, 1)):
                other = (row + down) % rows * columns + (column + across) % columns
                found.add(tuple(sorted((present[row * columns + column], present[other]))))
        return sorted((a, b) for a, b in found if a != b)


@dataclass(frozen=True, kw_only=True)
class BandwidthMatching(Topology):
    """One partner each: a random maximum matching of the fast links, refreshed by slow ones (SAPS, arXiv 2002.09692).

    Time is cut into windows of `refresh` rounds, or ceil(log2 R) if that is more. While a window has rounds to spare,
    only fast links are used and a peer without a partner stays alone. Once the remaining rounds are just enough to join
    the components of the window's pairs so far (each such round halves their number), the fastest links between
    different components are taken first. So the union of the pairs of every whole window is connected, as long as
    members and links stay the same in it. The earlier rounds of the window are replayed: there is no state.

    Attributes:
        quantile: a link is fast if it is at least as fast as this quantile of all pairs of members.
        refresh: rounds per window.
    """

    measures: ClassVar[bool] = True
    quantile: float = 0.5
    refresh: int = 10

    def __post_init__(self) -> None:
        if not 0.0 <= self.quantile < 1.0:
            raise UserError(f"quantile={self.quantile}: must be in [0, 1)", "0 uses all links, 0.5 the faster half")
        if self.refresh < 1:
            raise UserError(f"refresh={self.refresh}: must be at least 1 round", "10 is a good start")

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Grouping:
        """See `Topology.groups`.

        Raises:
            UserError: a member that `links` does not describe.
        """
        present = _checked(round, members)
        if links is not None and present and present[-1] >= links.size:
            raise UserError(f"member {present[-1]}: links describe only 0 to {links.size - 1}", "measure it first")
        window = max(self.refresh, _halvings(len(present)))
        pairs: tuple[Edge, ...] = ()
        components = tuple(present)
        for at in range(round - round % window, round + 1):
            order = ("bandwidth", seed, at)
            pairs, components = _matched(tuple(present), components, links, self.quantile, window - at % window, order)
        return with_singles(present, pairs)


@lru_cache(maxsize=256)  # every round asks again for all earlier ones of its window
def _matched(
    present: tuple[int, ...],
    components: tuple[int, ...],
    links: Links | None,
    quantile: float,
    rounds_left: int,
    order: tuple[object, ...],
) -> tuple[tuple[Edge, ...], tuple[int, ...]]:
    """One round of `BandwidthMatching`.

    Args:
        present: members, ascending.
        components: of each member, in the union of the window's earlier pairs.
        links: measured bandwidth.
        quantile: see `BandwidthMatching`.
        rounds_left: in the window, with this one.
        order: of the fast links: what `shuffled` takes.

    Returns:
        The pairs, and the components with them.
    """
    names, component = np.array(present, np.int64), np.array(components, np.int64)
    first, second = np.triu_indices(len(present), 1)
    speed = links.between(present)[first, second] if links else np.ones(len(first))
    pairs: list[Edge] = []
    if rounds_left <= _halvings(len(set(components))):
        by_speed = np.argsort(-speed, kind="stable")  # links of one speed come in the order of their members
        apart = by_speed[component[first[by_speed]] != component[second[by_speed]]]
        pairs = greedy_matching(zip(names[first[apart]].tolist(), names[second[apart]].tolist(), strict=True))
    free = ~np.isin(names, pairs)
    fast = free[first] & free[second] & (speed >= _quantile(speed, quantile))
    edges = zip(names[first[fast]].tolist(), names[second[fast]].tolist(), strict=True)
    pairs += maximum_matching(shuffled(edges, *order))
    for a, b in np.searchsorted(names, np.array(pairs, np.int64).reshape(-1, 2)):
        component[component == component[b]] = component[a]
    return tuple(pairs), tuple(component.tolist())


def _quantile(speed: NDArray[np.float64], quantile: float) -> float:
    """The value that this share of all is below."""
    return float(np.sort(speed)[int(quantile * len(speed))]) if len(speed) else 0.0


def _checked(round: int, members: Sequence[int]) -> list[int]:
    assert round >= 0, f"round={round}"
    return distinct(members)


def _halvings(count: int) -> int:
    return max(0, count - 1).bit_length()
