"""Matchings: edges of a graph of which no two share an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from peer.outer.topology.members import Edge


def greedy_matching(edges: Iterable[Edge]) -> list[Edge]:
    """Each edge in turn whose ends are both free, so that no edge between two free members is left."""
    taken: set[int] = set()
    matched = []
    for a, b in edges:
        if a not in taken and b not in taken:
            taken.update((a, b))
            matched.append((a, b))
    return matched


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
