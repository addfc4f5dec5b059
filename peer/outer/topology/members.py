"""Members of a round, the groups they form, and orders drawn from a shared seed.

Members are numbers at least 0 that all peers agree on. Chance comes from SHA-256, whose order is equal on every
platform and Python version; `random.shuffle` promises no such thing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

Edge = tuple[int, int]
Grouping = list[tuple[int, ...]]
_T = TypeVar("_T")


def distinct(members: Iterable[int]) -> list[int]:
    """The members in ascending order."""
    present = sorted(int(member) for member in members)
    assert len(set(present)) == len(present), f"members are not distinct: {present}"
    assert not present or present[0] >= 0, f"member {present[0]} is below 0"
    return present


def shuffled(items: Iterable[_T], *key: object) -> list[_T]:
    """In an order that depends on `key` and on the items' `repr` alone, not on the order in which they come."""
    begun = hashlib.sha256(f"({key!r}, ".encode())  # of repr((key, item)), whose beginning is the same for all

    def digest(item: _T) -> bytes:
        whole = begun.copy()
        whole.update(f"{item!r})".encode())
        return whole.digest()

    return sorted(items, key=digest)


def with_singles(present: Iterable[int], pairs: Sequence[Edge]) -> Grouping:
    """The partition of `present` into the pairs and groups of one."""
    taken = set(itertools.chain(*pairs))
    return partition([*pairs, *((member,) for member in present if member not in taken)])


def partition(groups: Iterable[Sequence[int]]) -> Grouping:
    """Ascending groups, in the order of their first members."""
    return sorted(tuple(sorted(group)) for group in groups)
