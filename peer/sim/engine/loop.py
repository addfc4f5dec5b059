"""The event loop: peers step, contribute, wait, merge, leave and return, in the order of simulated time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from peer.errors import UserError
from peer.sim.engine.churn import Churn
from peer.sim.engine.drain import close
from peer.sim.engine.exchanges import Exchanges
from peer.sim.engine.lineages import Lineages
from peer.sim.engine.partitions import Partitions
from peer.sim.engine.step_time import StepTimes
from peer.sim.engine.stepping import OnStep, Stepping
from peer.sim.engine.stragglers import Stragglers
from peer.sim.engine.swarm import SimSwarm
from peer.sim.round.rounds import ExchangeCost, RoundBook, SimRound
from peer.sim.world.network import links_of
from peer.sim.world.scenario import NetworkSplit

MAX_EVENTS = 50_000_000


class Engine:
    """Runs one swarm until its goal is reached."""

    def __init__(
        self,
        swarm: SimSwarm,
        lineages: Lineages,
        on_step: OnStep,
        partitions: Sequence[NetworkSplit] = (),
        seed: int = 0,
    ) -> None:
        self._swarm, self._partitions = swarm, list(partitions)
        anchors = [4.0 * length for length in swarm.sync.lengths]
        self._cost = ExchangeCost(swarm.recipe, swarm.profiles, swarm.division.shares, anchors)
        gathering = RoundBook(swarm.recipe, seed, swarm.present, links_of(swarm.profiles))
        self._exchanges = Exchanges(swarm, gathering, self._cost, self._on_result)
        lateness = Stragglers(swarm, self._exchanges)
        self._stepping = Stepping(swarm, self._exchanges, lateness, StepTimes(swarm, seed), on_step)
        self._presence = Churn(swarm, self._exchanges, lateness, self._stepping, lineages)
        self._splits = Partitions(swarm, self._exchanges, self._stepping, lineages)

    def run(self) -> None:
        """Run until the goal is reached and every exchange is over; then one last round of unsent progress.

        Raises:
            UserError: no peer is left to reach the goal, or it takes too many events.
        """
        swarm = self._swarm
        self._announce()
        while swarm.clock.pending and not (swarm.draining and self._exchanges.quiet):
            swarm.clock.advance()
            swarm.tally.events += 1
            if swarm.tally.events > MAX_EVENTS:
                raise UserError(f"more than {MAX_EVENTS} events", "fewer peers, or fewer tokens")
        if not swarm.draining:
            raise UserError(
                f"the swarm died after {swarm.tally.steps} of {swarm.pace.goal_steps} steps: no peer was left, "
                "or all peers waited for another",
                "give the scenario peers that stay, or the recipe a straggler deadline",
            )
        close(swarm, self._exchanges.gathering.unfinished(), self._cost)

    def _announce(self) -> None:
        """What the scenario has in store."""
        clock = self._swarm.clock
        for replica in self._swarm.replicas:
            for joins_s, leaves_s in replica.profile.presence:
                clock.at(joins_s, partial(self._presence.join, replica))
                if math.isfinite(leaves_s):
                    clock.at(leaves_s, partial(self._presence.leave, replica))
        for partition in self._partitions:
            clock.at(partition.start_s, partial(self._splits.split, partition))
            if math.isfinite(partition.end_s):
                clock.at(partition.end_s, self._splits.heal)

    def _on_result(self, round: SimRound) -> None:
        self._stepping.on_result(round)
