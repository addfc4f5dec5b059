"""Who averages with whom in a round: the same answer on every peer that has the same arguments.

Members are numbers at least 0 that all peers agree on; the order in which they are listed does not matter. Chance comes
from SHA-256, whose order is equal on every platform and Python version; `random.shuffle` promises no such thing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from torch import Tensor

from peer.errors import UserError
from peer.outer.state import CHUNK, chunks

Edge = tuple[int, int]
Partition = list[tuple[int, ...]]
_T = TypeVar("_T")


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
                raise UserError(f"links: {rate} bytes/s: must be finite and above 0", "leave out who has no link")

    @property
    def size(self) -> int:
        """How many members it describes."""
        return len(self.up)

    def both_ways(self, member: int) -> float:
        """Bytes per second that `member` can send while it receives as many."""
        return min(self.up[member], self.down[member])

    def between(self, a: int, b: int) -> float:
        """Bytes per second that `a` and `b` can send to each other at the same time."""
        slowest = min(self.both_ways(a), self.both_ways(b))
        return slowest if self.pair is None else min(slowest, self.pair[a][b], self.pair[b][a])


class Topology(Protocol):
    """Members -> the groups that average in a round."""

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Partition:
        """A partition of `members`; deterministic. Who is alone in its group keeps its own result.

        Args:
            round: at least 0.
            members: distinct numbers at least 0, in any order.
            seed: shared by the run.
            links: measured bandwidth, or None where nothing was measured; then all links count as equal.

        Returns:
            Ascending groups, in the order of their first members.
        """


@dataclass(frozen=True, kw_only=True)
class AllPeers:
    """One group of all: the exact mean in one round."""

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Partition:  # noqa: ARG002
        """See `Topology.groups`."""
        present = _checked(round, members)
        return [tuple(present)] if present else []


@dataclass(frozen=True, kw_only=True)
class RandomPairs:
    """Consecutive pairs of a permutation seeded by (seed, round) (NoLoCo, arXiv 2506.10911).

    Attributes:
        odd: with an odd number of members the last one stays "alone", or joins the last pair as a "triple".
    """

    odd: Literal["alone", "triple"] = "alone"

    def __post_init__(self) -> None:
        if self.odd not in ("alone", "triple"):
            raise UserError(f"odd={self.odd!r}: must be 'alone' or 'triple'", "'alone' skips a round of one member")

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Partition:  # noqa: ARG002
        """See `Topology.groups`."""
        order = _shuffled(_checked(round, members), "pairs", seed, round)
        drawn = [order[at : at + 2] for at in range(0, len(order), 2)]
        if self.odd == "triple" and len(order) % 2 and len(drawn) > 1:
            drawn[-2:] = [drawn[-2] + drawn[-1]]
        return _ordered(drawn)


@dataclass(frozen=True, kw_only=True)
class Groups:
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

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Partition:  # noqa: ARG002
        """See `Topology.groups`."""
        order = _shuffled(_checked(round, members), "grid", seed)
        sides = self.sides(len(order))
        axis = round % max(1, len(sides))
        stride, side = math.prod(sides[:axis]), (sides[axis] if sides else 1)
        lines: dict[int, list[int]] = {}
        for place, member in enumerate(order):
            lines.setdefault(place - place // stride % side * stride, []).append(member)
        return _ordered(lines.values())

    def sides(self, num_members: int) -> tuple[int, ...]:
        """Lengths of the grid's axes; none for fewer than two members."""
        num_axes = next(axes for axes in itertools.count() if self.size**axes >= num_members)
        grids = itertools.combinations_with_replacement(range(self.size, 1, -1), num_axes)
        return min((sides for sides in grids if math.prod(sides) >= num_members), key=math.prod)


@dataclass(frozen=True, kw_only=True)
class Neighbours:
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

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Partition:  # noqa: ARG002
        """See `Topology.groups`."""
        present = _checked(round, members)
        return _with_singles(present, _greedy(_shuffled(self.edges(present), self.graph, seed, round)))

    def edges(self, members: Sequence[int]) -> list[Edge]:
        """All edges (lower, higher), sorted: what `chi` and `mixing_weights` take."""
        present = _checked(0, members)
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
class BandwidthMatching:
    """One partner each: a random maximum matching of the fast links, refreshed by slow ones (SAPS, arXiv 2002.09692).

    Time is cut into windows of `refresh` rounds, or ceil(log2 R) if that is more. While a window has rounds to spare,
    only fast links are used and who finds no partner stays alone. Once the remaining rounds are just enough to join
    the components of the window's pairs so far (each such round halves their number), the fastest links between
    different components are taken first. So the union of the pairs of every whole window is connected, as long as
    members and links stay the same in it. The earlier rounds of the window are replayed: there is no state.

    Attributes:
        quantile: a link is fast if it is at least as fast as this quantile of all pairs of members.
        refresh: rounds per window.
    """

    quantile: float = 0.5
    refresh: int = 10

    def __post_init__(self) -> None:
        if not 0.0 <= self.quantile < 1.0:
            raise UserError(f"quantile={self.quantile}: must be in [0, 1)", "0 uses all links, 0.5 the faster half")
        if self.refresh < 1:
            raise UserError(f"refresh={self.refresh}: must be at least 1 round", "10 is a good start")

    def groups(self, round: int, members: Sequence[int], seed: int, links: Links | None) -> Partition:
        """See `Topology.groups`.

        Raises:
            UserError: a member that `links` does not describe.
        """
        present = _checked(round, members)
        if links is not None and present and present[-1] >= links.size:
            raise UserError(f"member {present[-1]}: links describe only 0 to {links.size - 1}", "measure it first")
        speed = {pair: links.between(*pair) if links else 1.0 for pair in itertools.combinations(present, 2)}
        threshold = sorted(speed.values())[int(self.quantile * len(speed))] if speed else 0.0
        fast = [pair for pair, rate in speed.items() if rate >= threshold]
        # Stable: links of one speed come in the order of their members.
        by_speed = sorted(speed, key=lambda pair: -speed[pair])
        window = max(self.refresh, _halvings(len(present)))
        component = {member: member for member in present}
        pairs: list[Edge] = []
        for at in range(round - round % window, round + 1):
            rounds_left = window - at % window
            pairs = []
            if rounds_left <= _halvings(len(set(component.values()))):
                pairs = _greedy(pair for pair in by_speed if component[pair[0]] != component[pair[1]])
            taken = set(itertools.chain(*pairs))
            free = [pair for pair in fast if not taken & set(pair)]
            pairs += maximum_matching(_shuffled(free, "bandwidth", seed, at))
            _join(component, pairs)
        return _with_singles(present, pairs)


def maximum_matching(edges: Sequence[Edge]) -> list[Edge]:
    """As many edges as possible without a common end (Edmonds' blossom algorithm, O(V^3)); ties follow the given order.

    Ours, since a library's choice among maximum matchings may change with its version, and peers' versions differ.
    """
    names = list(dict.fromkeys(itertools.chain(*edges)))
    index = {name: at for at, name in enumerate(names)}
    adjacent: list[list[int]] = [[] for _ in names]
    for a, b in edges:
        adjacent[index[a]].append(index[b])
        adjacent[index[b]].append(index[a])
    mate = _Blossom(adjacent).solve()
    return [(names[a], names[b]) for a, b in enumerate(mate) if a < b]


class _Blossom:
    """Grows one alternating tree per free vertex; odd cycles (blossoms) are shrunk to their base. -1 means none."""

    def __init__(self, adjacent: list[list[int]]) -> None:
        self.adjacent, self.size = adjacent, len(adjacent)
        self.mate = [-1] * self.size

    def solve(self) -> list[int]:
        for root in range(self.size):
            end = self._path_from(root) if self.mate[root] == -1 else -1
            while end != -1:
                before = self.parent[end]
                following, self.mate[end], self.mate[before] = self.mate[before], before, end
                end = following
        return self.mate

    def _path_from(self, root: int) -> int:
        self.parent, self.base = [-1] * self.size, list(range(self.size))
        reached, queue = {root}, [root]
        for v in queue:
            for to in self.adjacent[v]:
                if self.base[v] == self.base[to] or self.mate[v] == to:
                    continue
                if to == root or (self.mate[to] != -1 and self.parent[self.mate[to]] != -1):
                    shrunk = [u for u in self._shrink(v, to) if u not in reached]
                    reached.update(shrunk)
                    queue.extend(shrunk)
                elif self.parent[to] == -1:
                    self.parent[to] = v
                    if self.mate[to] == -1:
                        return to
                    reached.add(self.mate[to])
                    queue.append(self.mate[to])
        return -1

    def _shrink(self, v: int, to: int) -> list[int]:
        base, blossom = self._common_base(v, to), set[int]()
        for end, child in ((v, to), (to, v)):
            while self.base[end] != base:
                blossom.update((self.base[end], self.base[self.mate[end]]))
                self.parent[end] = child
                child = self.mate[end]
                end = self.parent[child]
        inside = [u for u in range(self.size) if self.base[u] in blossom]
        for u in inside:
            self.base[u] = base
        return inside

    def _common_base(self, a: int, b: int) -> int:
        seen = set()
        while True:
            a = self.base[a]
            seen.add(a)
            if self.mate[a] == -1:
                break
            a = self.parent[self.mate[a]]
        while self.base[b] not in seen:
            b = self.parent[self.mate[self.base[b]]]
        return self.base[b]


def mixing_weights(edges: Iterable[Edge], members: Sequence[int]) -> dict[int, dict[int, float]]:
    """Metropolis weights: W_ij = 1 / (1 + max(d_i, d_j)) on an edge, W_ii = 1 - sum_j W_ij, where d is the degree.

    Symmetric, not negative, rows that sum to 1: so the mean of all members is kept (Xiao, Boyd and Lall 2006; used by
    arXiv 2102.06280). Rows hold their nonzero neighbours and the member itself.
    """
    neighbours: dict[int, set[int]] = {member: set() for member in _checked(0, members)}
    for a, b in edges:
        assert a != b, f"edge from {a} to itself"
        neighbours[a].add(b)
        neighbours[b].add(a)
    rows = {}
    for member, others in neighbours.items():
        row = {other: 1.0 / (1 + max(len(others), len(neighbours[other]))) for other in sorted(others)}
        rows[member] = {**row, member: 1.0 - math.fsum(row.values())}
    return rows


def chi(edges: Sequence[Edge], rates: Mapping[Edge, float] | None = None) -> tuple[float, float]:
    """(chi1, chi2) of a connected graph (A2CiD2, arXiv 2306.08289, section 3).

    With L = sum_ij lambda_ij (e_i - e_j)(e_i - e_j)^T: chi1 = 1 / (smallest positive eigenvalue of L), and
    chi2 = 1/2 max over edges of (e_i - e_j)^T L^+ (e_i - e_j), half the largest effective resistance; chi2 <= chi1.

    Args:
        edges: (i, j) each once, i != j.
        rates: lambda_ij, pair events of each edge expected per unit of time (`dt` of `mix_` is in the same unit);
            by default equal, and one event per member on average: R / (2 |E|).

    Raises:
        UserError: no edges, or a graph that is not connected.
    """
    names = sorted(set(itertools.chain(*edges)))
    index = {name: at for at, name in enumerate(names)}
    laplacian = np.zeros((len(names), len(names)))
    differences = np.zeros((len(edges), len(names)))
    for row, edge in enumerate(edges):
        differences[row, index[edge[0]]], differences[row, index[edge[1]]] = 1.0, -1.0
        rate = rates[edge] if rates is not None else len(names) / (2 * len(edges))
        laplacian += rate * np.outer(differences[row], differences[row])
    eigenvalues = np.linalg.eigvalsh(laplacian) if edges else np.zeros(2)
    if eigenvalues[1] <= 1e-9 * max(eigenvalues[-1], 1e-300):
        raise UserError(f"a graph of {len(names)} members and {len(edges)} edges is not connected", "add edges")
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    resistances = np.einsum("en,nm,em->e", differences, inverse, differences)
    return 1.0 / float(eigenvalues[1]), 0.5 * float(resistances.max())


def a2cid2_coefficients(chi1: float, chi2: float) -> tuple[float, float]:
    """(eta, alpha_tilde) = (1 / (2 sqrt(chi1 chi2)), sqrt(chi1 / chi2) / 2) (arXiv 2306.08289)."""
    for name, value in (("chi1", chi1), ("chi2", chi2)):
        if not (math.isfinite(value) and value > 0.0):
            raise UserError(f"{name}={value}: must be finite and above 0", "take both from a connected graph")
    return 1.0 / (2.0 * math.sqrt(chi1 * chi2)), 0.5 * math.sqrt(chi1 / chi2)


def mix_(x: Tensor, x_tilde: Tensor, eta: float, dt: float) -> None:
    """Let (x, x~) flow together for `dt` since the last event, in place; their sum is kept (arXiv 2306.08289).

    With e = exp(-2 eta dt), a = (1 + e) / 2, b = (1 - e) / 2: x <- a x + b x~ and x~ <- b x + a x~. Both fp32 [n].
    """
    assert eta >= 0.0, f"eta={eta}"
    assert dt >= 0.0, f"dt={dt}"
    decay = math.exp(-2.0 * eta * dt)
    a, b = (1.0 + decay) / 2.0, (1.0 - decay) / 2.0
    if b == 0.0:
        return
    for start, stop in chunks(x.numel(), CHUNK):
        left, right = x[start:stop], x_tilde[start:stop]
        mixed = (left * a).add_(right * b)
        right.mul_(a).add_(left * b)
        left.copy_(mixed)


def pair_(x: Tensor, x_tilde: Tensor, other: Tensor, alpha_tilde: float) -> None:
    """A pair event, in place, after `mix_`: x~ -= alpha_tilde (x - x_j), then x <- (x + x_j) / 2 (arXiv 2306.08289).

    All fp32 [n]; `other` is the partner's x before the event, the only thing that is sent.
    """
    for start, stop in chunks(x.numel(), CHUNK):
        mine, partner = x[start:stop], other[start:stop]
        x_tilde[start:stop].sub_((mine - partner).mul_(alpha_tilde))
        mine.add_(partner).mul_(0.5)


def _checked(round: int, members: Sequence[int]) -> list[int]:
    assert round >= 0, f"round={round}"
    present = sorted(int(member) for member in members)
    assert len(set(present)) == len(present), f"members are not distinct: {present}"
    assert not present or present[0] >= 0, f"member {present[0]} is below 0"
    return present


def _shuffled(items: Iterable[_T], *key: object) -> list[_T]:
    return sorted(items, key=lambda item: hashlib.sha256(repr((key, item)).encode()).digest())


def _greedy(edges: Iterable[Edge]) -> list[Edge]:
    taken: set[int] = set()
    matched = []
    for a, b in edges:
        if a not in taken and b not in taken:
            taken.update((a, b))
            matched.append((a, b))
    return matched


def _halvings(count: int) -> int:
    return max(0, count - 1).bit_length()


def _join(component: dict[int, int], pairs: Iterable[Edge]) -> None:
    for a, b in pairs:
        into, gone = component[a], component[b]
        component.update({member: into for member, name in component.items() if name == gone})


def _with_singles(present: Iterable[int], pairs: Sequence[Edge]) -> Partition:
    taken = set(itertools.chain(*pairs))
    return _ordered([*pairs, *((member,) for member in present if member not in taken)])


def _ordered(groups: Iterable[Sequence[int]]) -> Partition:
    return sorted(tuple(sorted(group)) for group in groups)
