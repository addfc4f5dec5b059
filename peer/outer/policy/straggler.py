"""When a round starts without late members, and the weight of a late or partial contribution.

Policies are pure: arrival times decide when a round starts, and with which members. Times are seconds on
one clock of any origin. Every decision depends on arrivals up to its own time alone, so that an event simulator may ask
after each arrival, and a live group leader at each tick, and both come to the same result.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from peer.errors import UserError

Rosters = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Close:
    """The end of waiting: the round starts at `start_s` with `members`, ascending: all that arrived up to then."""

    start_s: float
    members: tuple[int, ...]


class StragglerPolicy(ABC):
    """Arrival times -> when a round starts, and its members.

    Attributes:
        asynchronous: rounds are not numbered by the peers' own steps: a peer that is ready joins the open one.
        every_arrival_counts: an arrival after the start is known may change it.
        deadline_s: how long it waits after the first arrival at the most; None where that does not decide.
    """

    asynchronous: ClassVar[bool] = False
    every_arrival_counts: ClassVar[bool] = False
    deadline_s: float | None = None

    @property
    def waits_for_all(self) -> bool:
        """Whether no peer ever misses a round."""
        return not self.asynchronous and self.deadline_s is None

    @property
    def period(self) -> int:
        """Rounds in a window, of which `next_decision` reads those that have begun."""
        return 1

    @property
    def timeout(self) -> ComputeTimeout | None:
        """What ends steps early, if anything does."""
        return None

    def within(self, seconds: float) -> StragglerPolicy:  # noqa: ARG002
        """The same, but a wait for all lasts no longer than this after the first arrival."""
        return self

    def paced(self, spare_s: float, exchange_s: float) -> StragglerPolicy:  # noqa: ARG002
        """The same with a window that follows from the pace of a round's members.

        Args:
            spare_s: that the fastest of them trains, from its contribution, before it needs the result.
            exchange_s: that exchange and commit of a round take.
        """
        return self

    def needed(self, num_expected: int) -> int:  # noqa: ARG002
        """The least arrivals with which `next_decision` decides."""
        return 1

    def weight(self, staleness: int, contributors: int = 1) -> float:
        """The factor on the weight of a contribution.

        Args:
            staleness: s, rounds that started since the contribution's anchor; 0 if none.
            contributors: K, contributions in this round.
        """
        assert staleness >= 0, f"staleness={staleness}"
        assert contributors >= 1, f"contributors={contributors}"
        return 1.0

    @abstractmethod
    def next_decision(
        self, expected: Sequence[int], arrived: Mapping[int, float], closed: Rosters = ()
    ) -> Close | None:
        """The round as it will start if no other member arrives before; None if another member must arrive first.

        Args:
            expected: members that are believed to be live. Others that arrive take part as well.
            arrived: arrival time of each member that has arrived, in seconds.
            closed: members of each earlier round, the first round first, or of those of this `period` alone; read by
                `Backup` alone.
        """


def close(
    policy: StragglerPolicy,
    expected: Sequence[int],
    arrived: Mapping[int, float],
    now: float,
    closed: Rosters = (),
) -> Close | None:
    """The round that starts at or before `now` (seconds), from arrivals up to `now` alone; None to wait on."""
    seen = {member: at for member, at in arrived.items() if at <= now}
    decision = policy.next_decision(expected, seen, closed)
    return decision if decision is not None and decision.start_s <= now else None


@dataclass(frozen=True, kw_only=True)
class WaitAll(StragglerPolicy):
    """Wait for all, but no longer than `deadline_s` after the first arrival (None: for ever)."""

    deadline_s: float | None = None

    def __post_init__(self) -> None:
        check_seconds("deadline_s", self.deadline_s)

    def within(self, seconds: float) -> WaitAll:
        return WaitAll(deadline_s=seconds if self.deadline_s is None else min(seconds, self.deadline_s))

    def next_decision(
        self, expected: Sequence[int], arrived: Mapping[int, float], closed: Rosters = ()  # noqa: ARG002
    ) -> Close | None:
        return earliest(arrived, _all_at(expected, arrived), after_first(arrived, self.deadline_s))


@dataclass(frozen=True, kw_only=True)
class Quorum(StragglerPolicy):
    """Start when the grace after the K-th arrival is over, or all are there (Decoupled DiLoCo, arXiv 2604.21428).

    A peer that misses the round contributes later, with a staleness of as many rounds, and less weight.

    Attributes:
        count: K; at most all of the expected members are waited for. Either this or `fraction`.
        fraction: K as a share of the expected members, rounded up.
        grace_s: how long the quorum waits for others at the least.
        slack: and for this share of the time that the fastest member trains before it needs the result.
        window_s: that time after the first arrival, of this round; see `paced`.
        discount_stale: whether a contribution's weight falls with its staleness, see `weight`.
        deadline_s: after the first arrival, start without a quorum; see `within`.
    """

    asynchronous: ClassVar[bool] = True
    count: int | None = None
    fraction: float | None = None
    grace_s: float = 0.0
    slack: float = 0.0
    discount_stale: bool = True
    window_s: float = field(default=0.0, metadata={"bound": True})
    deadline_s: float | None = field(default=None, metadata={"bound": True})

    def __post_init__(self) -> None:
        if (self.count is None) == (self.fraction is None):
            raise UserError(f"quorum count={self.count} and fraction={self.fraction}: give exactly one", "count: 2")
        if self.count is not None and self.count < 1:
            raise UserError(f"quorum count={self.count}: must be at least 1", "2 is the least that averages")
        if self.fraction is not None and not 0.0 < self.fraction <= 1.0:
            raise UserError(f"quorum fraction={self.fraction}: must be in (0, 1]", "1 waits for all")
        check_seconds("grace_s", self.grace_s)
        if not 0.0 <= self.slack <= 1.0:
            raise UserError(f"quorum slack={self.slack}: must be in [0, 1]", "0 waits for grace_s alone")

    def within(self, seconds: float) -> Quorum:
        """The same, but members that say they come, and do not, hold up a round no longer than this."""
        return replace(self, deadline_s=seconds)

    def paced(self, spare_s: float, exchange_s: float) -> Quorum:
        return replace(self, window_s=self.slack * max(0.0, spare_s - exchange_s))

    def weight(self, staleness: int, contributors: int = 1) -> float:
        """(sqrt(K) / K) (1 + s)^-1/2 if staleness is discounted (arXiv 2604.21428)."""
        if not self.discount_stale:
            return super().weight(staleness, contributors)
        return math.sqrt(contributors) / contributors / math.sqrt(1.0 + staleness)

    def needed(self, num_expected: int) -> int:
        """K: the arrivals that start the grace window."""
        share = math.ceil(self.fraction * num_expected) if self.fraction is not None else self.count
        return max(1, min(share or 1, num_expected))

    def next_decision(
        self, expected: Sequence[int], arrived: Mapping[int, float], closed: Rosters = ()  # noqa: ARG002
    ) -> Close | None:
        times, needed = sorted(arrived.values()), self.needed(len(expected))
        quorum_s = math.inf
        if len(times) >= needed:
            quorum_s = max(times[needed - 1] + self.grace_s, times[0] + self.window_s)
        return earliest(arrived, _all_at(expected, arrived), quorum_s, after_first(arrived, self.deadline_s))


@dataclass(frozen=True, kw_only=True)
class ComputeTimeout(StragglerPolicy):
    """Stop accumulating micro-batches `tau_s` after the step began, then all-reduce (DropCompute, arXiv 2306.10598).

    The round itself waits for all: no peer computes for long after tau.

    Attributes:
        tau_s: infinity drops nothing; None takes `choose_timeout`'s from measured times.
        normalise: divide the sum of gradients by the micro-batches "computed", or by the "fixed" number planned.
        deadline_s: after the first arrival, start without the others; see `within`.
    """

    tau_s: float | None = math.inf
    normalise: Literal["computed", "fixed"] = "computed"
    deadline_s: float | None = field(default=None, metadata={"bound": True})

    def __post_init__(self) -> None:
        if self.tau_s is not None and not self.tau_s > 0.0:
            raise UserError(f"tau_s={self.tau_s}: must be above 0 seconds", "leave it out to drop nothing")
        if self.normalise not in ("computed", "fixed"):
            raise UserError(f"normalise={self.normalise!r}: must be 'computed' or 'fixed'", "published: 'computed'")

    @property
    def timeout(self) -> ComputeTimeout:
        return self

    @property
    def fixed(self) -> bool:
        """Whether what was dropped counts as zeros in the mean."""
        return self.normalise == "fixed"

    def within(self, seconds: float) -> ComputeTimeout:
        return replace(self, deadline_s=seconds)

    def count(self, times: Sequence[float]) -> int:
        """How many of the micro-batches, of these durations in seconds, are finished by tau; may be 0."""
        assert self.tau_s is not None, "choose a timeout first"
        return sum(finished <= self.tau_s for finished in itertools.accumulate(times))

    def next_decision(
        self, expected: Sequence[int], arrived: Mapping[int, float], closed: Rosters = ()
    ) -> Close | None:
        return WaitAll(deadline_s=self.deadline_s).next_decision(expected, arrived, closed)


def check_seconds(name: str, value: float | None) -> None:
    """Refuse seconds that are neither None nor finite and at least 0.

    Raises:
        UserError: names the value.
    """
    if value is not None and not (math.isfinite(value) and value >= 0.0):
        raise UserError(f"{name}={value}: must be finite and at least 0 seconds", "0 does not wait")


def _all_at(expected: Sequence[int], arrived: Mapping[int, float]) -> float:
    if len(arrived) < len(expected):  # asked after every arrival: with many peers the rest would take a square
        return math.inf
    return max((arrived.get(member, math.inf) for member in expected), default=math.inf)


def after_first(arrived: Mapping[int, float], seconds: float | None) -> float:
    return min(arrived.values(), default=math.inf) + (math.inf if seconds is None else seconds)


def earliest(arrived: Mapping[int, float], *moments: float) -> Close | None:
    start_s = min(moments)
    if math.isinf(start_s):
        return None
    return Close(start_s=start_s, members=tuple(sorted(member for member, at in arrived.items() if at <= start_s)))
