"""The straggler policy of backup members, with which the rounds of a window connect all peers (arXiv 2102.06280)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from peer.errors import UserError
from peer.outer.policy.straggler import Close, Rosters, StragglerPolicy, after_first, check_seconds, earliest


@dataclass(frozen=True, kw_only=True)
class Backup(StragglerPolicy):
    """Wait for the fastest only, as long as the union of a window's rounds connects all peers (arXiv 2102.06280).

    The number of backup members (not waited for) changes by round. The members of one round average with each
    other and are so connected. Rounds are counted in windows of `window`; a round with m rounds left in its window,
    itself included, and k components in the union of the window's rounds so far, starts at the arrival with which at
    least max(k - m + 1, min(2, k)) components are present: at least one new connection each round, as in the paper's
    spanning path, and all that are missing in the last. A window of 1 waits for all.

    Attributes:
        window: rounds within which every member is connected to every other.
        minimum: members that a round has at least, as far as so many are expected.
        deadline_s: after the first arrival, start with the members present and give up the guarantee: a dead member
            that is still expected would block the last round of a window. None waits forever.
    """

    asynchronous: ClassVar[bool] = True
    every_arrival_counts: ClassVar[bool] = True
    window: int
    minimum: int = 2
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"window={self.window}: must be at least 1 round", "1 waits for all")
        if self.minimum < 1:
            raise UserError(f"minimum={self.minimum}: must be at least 1 member", "2 is the least that averages")
        check_seconds("deadline_s", self.deadline_s)

    @property
    def period(self) -> int:
        return self.window

    def within(self, seconds: float) -> Backup:
        return replace(self, deadline_s=seconds if self.deadline_s is None else min(seconds, self.deadline_s))

    def next_decision(
        self, expected: Sequence[int], arrived: Mapping[int, float], closed: Rosters = ()
    ) -> Close | None:
        position = len(closed) % self.window
        components = _components(tuple(expected), tuple(closed[len(closed) - position :]))
        connected_s = self._connected_s(components, arrived, self.window - position)
        return earliest(arrived, connected_s, after_first(arrived, self.deadline_s))

    def _connected_s(self, components: _Components, arrived: Mapping[int, float], rounds_left: int) -> float:
        """When enough components were present, in seconds; infinity if they are not yet."""
        component_of, known, connected = components.of, set(components.expected), set(components.members)
        # Asked after every arrival: with many peers the rest would take a square.
        if len({component_of.get(member, member) for member in arrived}) < _needed(len(known), rounds_left):
            return math.inf
        reached = set[int]()
        for count, member in enumerate(sorted(arrived, key=lambda member: (arrived[member], member)), start=1):
            component = component_of.get(member, member)
            connected.add(member)
            known.add(component)
            reached.add(component)
            if count >= min(self.minimum, len(connected)) and len(reached) >= _needed(len(known), rounds_left):
                return arrived[member]
        return math.inf


def _needed(num_components: int, rounds_left: int) -> int:
    return max(num_components - rounds_left + 1, min(2, num_components))


@dataclass(frozen=True, kw_only=True)
class _Components:
    """The members that the rounds of a window have connected so far.

    Attributes:
        members: that are expected.
        of: component of each member of the rounds; a member of none is a component of its own.
        expected: components of `members`.
    """

    members: frozenset[int]
    of: Mapping[int, int]
    expected: frozenset[int]


@lru_cache(maxsize=16)  # the same for nearly every arrival at a round
def _components(expected: tuple[int, ...], rounds: tuple[tuple[int, ...], ...]) -> _Components:
    component: dict[int, int] = {}
    for group in rounds:
        joined = {component.get(member, member) for member in group}
        members = [member for member, name in component.items() if name in joined]
        component.update(dict.fromkeys((*members, *group), min(joined)))
    known = frozenset(component.get(member, member) for member in expected)
    return _Components(members=frozenset(expected), of=component, expected=known)
