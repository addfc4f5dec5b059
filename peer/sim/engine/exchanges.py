"""Rounds under way, from a member's contribution to the commit: when they start, how long they take, what breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from peer.outer.policy.straggler import StragglerPolicy
from peer.sim.engine.swarm import SimSwarm
from peer.sim.learner.replica import SimReplica
from peer.sim.round.contribution import Contribution
from peer.sim.round.rounds import ExchangeCost, RoundBook, SimRound
from peer.sim.world.overlap import WHOLE, pipelined

VOTE_BYTES = 1.0


class Exchanges:
    """All rounds that are under way.

    Args:
        cost: seconds and bytes of an exchange.
        on_result: called with each round that is done, before its contributions are forgotten.
    """

    def __init__(
        self, swarm: SimSwarm, gathering: RoundBook, cost: ExchangeCost, on_result: Callable[[SimRound], None]
    ) -> None:
        self.gathering = gathering
        self._swarm, self._cost, self._on_result = swarm, cost, on_result
        self._sides: dict[SimRound, int] = {}

    @property
    def quiet(self) -> bool:
        """Whether nothing is being sent."""
        return all(round.state != "exchanging" for round in self._sides)

    # gathering ----------------------------------------------------------------------------------------------------

    def arrive(self, round: SimRound, replica: SimReplica, contribution: Contribution) -> None:
        """A member has come."""
        self._sides[round] = replica.side
        round.arrived[replica.index] = self._swarm.clock.now
        round.contributions[replica.index] = contribution
        round.expected.add(replica.index)
        if self._may_decide(round):
            self.plan(round)

    def _may_decide(self, round: SimRound) -> bool:
        """False if the straggler policy's answer to an arrival is known: asking a thousand times a round is slow."""
        policy, arrived = self._swarm.recipe.straggler, len(round.arrived)
        if arrived == len(round.expected) or policy.every_arrival_counts:
            return True
        if policy.waits_for_all:
            return False
        # A peer that arrives after the start is planned changes the members, not the start, and takes part: see `plan`.
        return not round.planned and arrived >= policy.needed(len(round.expected))

    def plan(self, round: SimRound) -> None:
        """Ask the straggler policy when this round may start, as far as is known now."""
        round.attempt += round.state == "gathering"
        round.planned = False
        if round.state != "gathering" or not round.arrived:
            return
        decision = self._paced(round).next_decision(sorted(round.expected), round.arrived, self.gathering.closed)
        if decision is None:
            return
        round.planned = True
        if decision.start_s <= self._swarm.clock.now:
            self._start(round)
        else:
            self._at(decision.start_s, round, self._start)

    def _paced(self, round: SimRound) -> StragglerPolicy:
        """The straggler policy at the pace of those that have come."""
        swarm = self._swarm
        if not (swarm.recipe.straggler.asynchronous and swarm.recipe.overlap_steps):
            return swarm.recipe.straggler
        here = replace(round, members=tuple(round.arrived))
        fastest = max(swarm.profiles[member].speed for member in here.members)
        exchange_s = self._cost.seconds(here, swarm.sync.wire_bytes(round.fragment))
        return swarm.recipe.straggler.paced(swarm.recipe.overlap_steps * swarm.step_s(fastest), exchange_s)

    def _at(self, time_s: float, round: SimRound, action: Callable[[SimRound], None]) -> None:
        """Unless the plan changes before."""
        attempt = round.attempt
        self._swarm.clock.at(time_s, lambda: action(round) if round.attempt == attempt else None)

    def _start(self, round: SimRound) -> None:
        round.members = members = tuple(sorted(round.arrived))
        round.rate = self._swarm.learning_rate(self._swarm.replicas[members[0]], just_made=True)
        self.gathering.started(round, self._sides[round])
        self._begin(round, members)

    # exchanging ---------------------------------------------------------------------------------------------------

    def _begin(self, round: SimRound, members: tuple[int, ...]) -> None:
        """These members exchange, from now."""
        round.state, round.members = "exchanging", members
        round.attempt += 1
        self._at(self._swarm.clock.now + self._delay_s(round), round, self._commit)

    def _delay_s(self, round: SimRound) -> float:
        """Seconds until the members of an exchange that begins now need wait for it no longer."""
        swarm, now = self._swarm, self._swarm.clock.now
        latency_s, votes = self._cost.latency_s(round), swarm.recipe.votes is not None
        if not self._wanted(round):
            return latency_s
        transfer_s = self._cost.seconds(round, swarm.sync.wire_bytes(round.fragment)) - latency_s
        # With a deadline or a vote the members, or their votes, are known only after the step.
        known = not votes and len(round.members) == len(round.expected) and self._has_just_stepped(round)
        speeds = [swarm.profiles[member].speed for member in round.members]
        delay_s, link_free_s = pipelined(
            swarm.pace.layers[round.fragment] if swarm.pace.layers else WHOLE, transfer_s, latency_s,
            step_before_s=swarm.step_s(min(speeds)) if known else 0.0, step_after_s=swarm.step_s(max(speeds)),
            link_free_s=max(swarm.stays[member].link_free_s for member in round.members) - now,
        )
        for member in round.members:
            swarm.stays[member].link_free_s = now + link_free_s
        return delay_s

    def _has_just_stepped(self, round: SimRound) -> bool:
        """Whether the last member that came did so right after its step, and came last of all now."""
        last = next(reversed(round.arrived))
        return round.arrived[last] == self._swarm.stays[last].stepped_s == self._swarm.clock.now

    def _wanted(self, round: SimRound) -> bool:
        return self._swarm.recipe.votes is None or any(
            self._swarm.replicas[member].vote for member in round.members
        )

    def _commit(self, round: SimRound) -> None:
        swarm, side = self._swarm, self._sides.pop(round)
        members = [swarm.replicas[member] for member in round.members]
        sent = [round.contributions[member] for member in round.members]
        if self._wanted(round):
            round.outcome = swarm.sync.commit(members, sent, round.fragment, round.number, round.rate)
            traffic = self._cost.traffic(round, swarm.sync.wire_bytes(round.fragment))
            swarm.tally.committed += 1
            swarm.tally.count_dropped(round.outcome.dropped)
        else:
            traffic = dict.fromkeys(round.members, VOTE_BYTES * (len(round.members) - 1))
            for replica, contribution in zip(members, sent, strict=True):
                swarm.sync.give_back(replica, contribution, round.fragment)
        swarm.count_sent(traffic)
        round.state = "done"
        self.gathering.finished(round, side)
        self._on_result(round)
        round.contributions.clear()  # what was decoded for the round takes memory, and plans are kept for a while

    # breaking off -------------------------------------------------------------------------------------------------

    def withdraw(self, round: SimRound, gone: SimReplica) -> bool:
        """A peer is gone; of an exchange, the others make it again among themselves.

        Returns:
            False if that leaves no member for the round.
        """
        round.watchers.discard(gone.index)
        if gone.index not in round.expected and gone.index not in round.arrived:
            return True
        round.expected.discard(gone.index)
        round.arrived.pop(gone.index, None)
        round.contributions.pop(gone.index, None)
        if round.state == "exchanging" and gone.index in round.members:
            self._swarm.tally.aborted += 1
            return self._make_again(round, tuple(member for member in round.members if member != gone.index))
        if round.expected:
            self.plan(round)
        return bool(round.expected)

    def _make_again(self, round: SimRound, rest: tuple[int, ...]) -> bool:
        self._free_links(round)
        if rest:
            self._begin(round, rest)
        elif round.expected and not self.gathering.asynchronous:
            round.state, round.members, round.attempt = "gathering", (), round.attempt + 1
            self.plan(round)
        else:
            return False
        return True

    def give_up(self, rounds: Sequence[SimRound]) -> None:
        """The work of their members is carried by the next round."""
        self.gathering.forget(rounds)
        for round in rounds:
            self._free_links(round)
            round.state, round.attempt = "done", round.attempt + 1
            self._sides.pop(round, None)
            for member, contribution in round.contributions.items():
                self._swarm.sync.give_back(self._swarm.replicas[member], contribution, round.fragment)

    def _free_links(self, round: SimRound) -> None:
        for member in round.members:
            stay = self._swarm.stays[member]
            stay.link_free_s = min(stay.link_free_s, self._swarm.clock.now)
