"""Peers that come and go, and what the rounds under way make of it."""

from __future__ import annotations

from peer.sim.engine.exchanges import Exchanges
from peer.sim.engine.lineages import Lineages
from peer.sim.engine.stepping import Stepping
from peer.sim.engine.stragglers import Stragglers
from peer.sim.engine.swarm import PeerWait, SimSwarm, clones
from peer.sim.learner.replica import SimReplica
from peer.sim.round.rounds import SimRound


class Churn:
    """Joining and leaving.

    Args:
        lateness: brings a newcomer to the pace of the others.
    """

    def __init__(
        self, swarm: SimSwarm, exchanges: Exchanges, lateness: Stragglers, stepping: Stepping, lineages: Lineages
    ) -> None:
        self._swarm, self._exchanges, self._lateness = swarm, exchanges, lateness
        self._stepping, self._lineages = stepping, lineages

    def join(self, replica: SimReplica) -> None:
        """From now on it is there; unless it joins at the very start, it takes state and pace from the others."""
        swarm = self._swarm
        if replica.present or swarm.draining:
            return
        replica.present, replica.life, replica.arrived_s = True, replica.life + 1, swarm.clock.now
        if swarm.clock.now > 0.0 or replica.life > 1:
            swarm.tally.joins += 1
            donor = next(iter(swarm.others(replica)), None)
            replica.unsent_tokens = [0] * len(replica.unsent_tokens)
            self._lateness.take_pace_of_others(replica)
            self._lineages.join(replica, donor)
            if donor is not None and clones(swarm.recipe):
                self._continue_as(replica, donor)
        self._stepping.go_on(replica)

    def _continue_as(self, replica: SimReplica, donor: SimReplica) -> None:
        """What is under way concerns the newcomer as it concerns the peer that it continues."""
        replica.position = donor.position
        self._swarm.stays[replica.index].pending = list(self._swarm.stays[donor.index].pending)
        for round in self._exchanges.gathering.unfinished():
            if donor.index in round.arrived:
                round.watchers.add(replica.index)
            elif donor.index in round.expected and round.state == "gathering":
                round.expected.add(replica.index)

    def leave(self, replica: SimReplica) -> None:
        """Remove a peer, and with it what it has not sent; no round waits for it."""
        swarm = self._swarm
        if not replica.present or swarm.draining:
            return
        replica.present, replica.life = False, replica.life + 1
        swarm.count_time(replica)
        swarm.tally.leaves += 1
        swarm.stays[replica.index] = PeerWait()
        for round in self._exchanges.gathering.unfinished():
            if not self._exchanges.withdraw(round, replica):
                self._dissolve(round)

    def _dissolve(self, round: SimRound) -> None:
        self._exchanges.give_up([round])
        for member in [*round.arrived, *sorted(round.watchers)]:
            self._stepping.go_on_after(round, self._swarm.replicas[member])
