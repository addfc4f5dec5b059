"""Rounds in virtual time: expected members, arrivals, when the exchange starts and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peer.outer.policy.regular import Event
from peer.outer.recipe.recipe import Recipe
from peer.outer.topology.topologies import Links
from peer.sim.round.contribution import CommittedRound, Contribution
from peer.sim.world.network import (
    agreement_seconds,
    gather_seconds,
    gather_traffic,
    pair_seconds,
    reduce_seconds,
    reduce_traffic,
)
from peer.sim.world.scenario import PeerProfile

State = Literal["gathering", "exchanging", "done"]


@dataclass(eq=False)
class SimRound:
    """One round of one fragment by one group.

    Attributes:
        fragment, number, send_step: as in `Event`.
        expected: members that are waited for.
        arrived: virtual seconds at which each arrived.
        watchers: peers that joined meanwhile from a member's state; they merge the result like members.
        attempt: counts changes of plan; an event of an earlier plan is void.
        planned: it is known when it will start if no other peer arrives.
        rate: of the steps that it exchanges; later ones may have been made by its end.
    """

    fragment: int
    number: int
    expected: set[int]
    send_step: int = 0
    arrived: dict[int, float] = field(default_factory=dict)
    contributions: dict[int, Contribution] = field(default_factory=dict)
    watchers: set[int] = field(default_factory=set)
    attempt: int = 0
    planned: bool = False
    rate: float = 0.0
    state: State = "gathering"
    members: tuple[int, ...] = ()
    outcome: CommittedRound | None = None


class ExchangeCost:
    """How long an exchange takes and what its members send.

    Args:
        recipe: decides between reduce and gather; in gossip, all members send each other everything.
        shares: fraction of the vector that each peer reduces, by index; None for equal ones.
        anchor_bytes: of each fragment's anchor, which members with anchors of their own send as well.
    """

    def __init__(
        self, recipe: Recipe, profiles: Sequence[PeerProfile], shares: Sequence[float] | None,
        anchor_bytes: Sequence[float] = (),
    ) -> None:
        self._recipe, self._profiles, self._shares = recipe, profiles, shares
        self._gossips = recipe.gossips
        self._anchor_bytes = anchor_bytes if recipe.gossips and recipe.payload == "delta" else ()

    def seconds(self, round: SimRound, update_bytes: float) -> float:
        """From the start of the exchange until every member has agreed to the result."""
        return self._seconds(round, self._payloads(round), update_bytes)

    def latency_s(self, round: SimRound) -> float:
        """What of `seconds` is left when nothing is sent."""
        return self._seconds(round, [0.0] * len(round.members), 0.0)

    def _seconds(self, round: SimRound, payloads: Sequence[float], update_bytes: float) -> float:
        profiles = [self._profiles[member] for member in round.members]
        if len(profiles) < 2:
            return 0.0
        agreeing_s = agreement_seconds(profiles)
        if len(profiles) == 2 and self._gossips:
            return agreeing_s + pair_seconds(profiles[0], profiles[1], payloads[0], payloads[1])
        if self._gossips or self._recipe.exchange == "gather":
            return agreeing_s + gather_seconds(profiles, payloads)
        return agreeing_s + reduce_seconds(profiles, max(payloads), update_bytes, self._shares_of(round.members))

    def traffic(self, round: SimRound, update_bytes: float) -> dict[int, float]:
        """Bytes that each member sends."""
        payloads = self._payloads(round)
        count = len(round.members)
        if count < 2:
            return dict.fromkeys(round.members, 0.0)
        if self._gossips or self._recipe.exchange == "gather":
            sent = list(gather_traffic(payloads))
        else:
            sent = list(reduce_traffic(count, max(payloads), update_bytes, self._shares_of(round.members)))
        return {member: float(num_bytes) for member, num_bytes in zip(round.members, sent, strict=True)}

    def _payloads(self, round: SimRound) -> list[float]:
        """Bytes from each member to every other one, with its own anchor if it has one (arXiv 2506.10911)."""
        anchor = self._anchor_bytes[round.fragment] if self._anchor_bytes else 0.0
        return [round.contributions[member].wire_bytes + anchor for member in round.members]

    def _shares_of(self, members: Sequence[int]) -> list[float] | None:
        if self._shares is None:
            return None
        own = [self._shares[member] for member in members]
        total = sum(own)
        return [share / total for share in own] if total > 0 else None


class RoundBook:
    """All rounds that are not over, and which one a peer's contribution belongs to.

    Args:
        present: (side of a partition) -> the peers that are there, ascending.
    """

    def __init__(self, recipe: Recipe, seed: int, present: Callable[[int], list[int]], links: Links) -> None:
        self._recipe, self._seed, self._present, self._links = recipe, seed, present, links
        self._plans: dict[tuple[int, int, int], list[SimRound]] = {}
        self._places: dict[tuple[int, int, int], dict[int, SimRound]] = {}  # of each peer in the groups as planned
        self._number: dict[tuple[int, int], int] = {}
        self._last_over: dict[tuple[int, int], int] = {}
        self.closed: list[tuple[int, ...]] = []

    @property
    def asynchronous(self) -> bool:
        """Whether rounds are not numbered by the peers' own steps: a peer that is ready joins the open one."""
        return self._recipe.straggler.asynchronous

    def round_for(self, peer: int, side: int, event: Event) -> SimRound | None:
        """The round that this peer joins; None if it is over already, and the peer has to catch up."""
        fragment, number = event.fragment, event.round
        if self.asynchronous:
            number = self._number.get((side, fragment), 0) + 1
        key = (side, fragment, number)
        if key not in self._plans:
            if number <= self._last_over.get((side, fragment), 0):
                return None
            groups = self._recipe.topology.groups(number, self._present(side), self._seed, self._links)
            self._plans[key] = [SimRound(fragment, number, set(group), event.send_step) for group in groups]
            self._places[key] = {member: round for round in self._plans[key] for member in round.expected}
        rounds = self._plans[key]
        own = self._places[key].get(peer)
        if own is None or peer not in own.expected or own.state == "done":  # a peer arrived, or a round was abandoned
            own = next((round for round in rounds if peer in round.expected), None)
        if own is None and not self._recipe.gossips and rounds:
            own = rounds[0]
        return own if own is not None and own.state == "gathering" else None

    def started(self, round: SimRound, side: int) -> None:
        """The exchange of `round` has begun: the next contribution opens another."""
        if self.asynchronous:
            self._number[side, round.fragment] = round.number
            self.closed.append(round.members)

    def finished(self, round: SimRound, side: int) -> None:
        """Forget plans that no peer can join any more."""
        key = (side, round.fragment, round.number)
        if all(other.state == "done" for other in self._plans.get(key, [])):
            self._last_over[side, round.fragment] = max(round.number, self._last_over.get(key[:2], 0))
            for old in [k for k in self._plans if k[:2] == key[:2] and k[2] < round.number - 2]:
                del self._plans[old], self._places[old]

    def forget(self, rounds: Sequence[SimRound]) -> None:
        """Abandon these rounds: the next contribution opens others."""
        for key, planned in list(self._plans.items()):
            kept = [round for round in planned if round not in rounds]
            if kept:
                self._plans[key] = kept
            else:
                del self._plans[key], self._places[key]

    def waiting_for(self, peer: int) -> SimRound | None:
        """A round in which another peer waits for this one, if there is one."""
        waiting = (round for round in self.unfinished() if round.state == "gathering" and round.arrived)
        return next((round for round in waiting if peer in round.expected and peer not in round.arrived), None)

    def unfinished(self) -> list[SimRound]:
        """Rounds that are not over."""
        return [round for rounds in self._plans.values() for round in rounds if round.state != "done"]
