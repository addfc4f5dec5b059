"""Peers that a round does not wait for: what they still send, and how they continue without it."""

from __future__ import annotations

from collections.abc import Sequence

from peer.outer.policy.regular import Event
from peer.sim.engine.exchanges import Exchanges
from peer.sim.engine.swarm import SimSwarm
from peer.sim.learner.replica import SimReplica
from peer.sim.round.rounds import SimRound


class Stragglers:
    """Deadlines, and catching up with the others."""

    def __init__(self, swarm: SimSwarm, exchanges: Exchanges) -> None:
        self._swarm, self._exchanges = swarm, exchanges

    def last_chance(self, replica: SimReplica) -> Sequence[Event]:
        """A round that waits for this peer, and whose deadline its next step would miss: it sends what it has."""
        swarm, patience_s = self._swarm, self._swarm.recipe.straggler.deadline_s
        if patience_s is None:
            return ()
        round = self._exchanges.gathering.waiting_for(replica.index)
        next_s = swarm.clock.now + swarm.step_s(replica.profile.speed)
        if round is None or next_s <= min(round.arrived.values()) + patience_s:
            return ()
        steps = swarm.division.steps
        sent_at = round.number * steps[replica.index] if steps is not None else round.send_step
        replica.position = max(replica.position, sent_at)
        apply_step = replica.position + swarm.recipe.overlap_steps
        return (Event(fragment=round.fragment, round=round.number, send_step=sent_at, apply_step=apply_step),)

    def left_out(self, replica: SimReplica, round: SimRound) -> None:
        """It arrived after the round had started without it."""
        stay = self._swarm.stays[replica.index]
        stay.pending = [entry for entry in stay.pending if entry[1] is not round]
        self._swarm.sync.give_back(replica, round.contributions[replica.index], round.fragment)
        self.catch_up(replica)

    def catch_up(self, replica: SimReplica) -> None:
        """Bring a late peer up to date: the anchor with its own progress on top, and the others' pace."""
        self._swarm.tally.late += 1
        self.take_pace_of_others(replica)
        if replica.learner is not None:
            replica.learner.carry_over()
        if self._swarm.recipe.straggler.waits_for_all:
            self._excuse(replica)

    def take_pace_of_others(self, replica: SimReplica) -> None:
        """Take the position of the peer that is furthest ahead."""
        others = self._swarm.others(replica)
        if others:
            replica.base_round = max(other.base_round for other in others)
            self._swarm.stand_at(replica, self._swarm.rounds_made(others))

    def _excuse(self, replica: SimReplica) -> None:
        """No longer expect this peer in the rounds that it has passed."""
        for round in self._exchanges.gathering.unfinished():
            if round.state != "gathering" or replica.index not in round.expected - set(round.arrived):
                continue
            if self._has_passed(replica, round):
                round.expected.discard(replica.index)
                self._exchanges.plan(round)

    def _has_passed(self, replica: SimReplica, round: SimRound) -> bool:
        if self._swarm.division.steps is not None:
            return round.number <= self._swarm.rounds_made([replica])
        return round.send_step <= replica.position
