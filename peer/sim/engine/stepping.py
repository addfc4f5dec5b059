"""What one peer does all its life: step, contribute, wait, merge, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peer.outer.policy.regular import Event
from peer.outer.recipe.recipe import paced
from peer.sim.engine.exchanges import Exchanges
from peer.sim.engine.step_time import StepTimes
from peer.sim.engine.stragglers import Stragglers
from peer.sim.engine.swarm import SimSwarm
from peer.sim.learner.replica import SimReplica
from peer.sim.round.contribution import Contribution
from peer.sim.round.rounds import SimRound

OnStep = Callable[[int, float], None]
"""(steps of all peers so far, virtual seconds), after every inner step of any peer."""


class Stepping:
    """The inner loop of every peer, and its side of a round."""

    def __init__(
        self, swarm: SimSwarm, exchanges: Exchanges, lateness: Stragglers, times: StepTimes, on_step: OnStep
    ) -> None:
        self._swarm, self._exchanges, self._lateness = swarm, exchanges, lateness
        self._times, self._on_step = times, on_step
        recipe, steps = swarm.recipe, swarm.division.steps
        self._schedules = [
            recipe.schedule if steps is None else paced(recipe.schedule, steps[replica.index], recipe.name)
            for replica in swarm.replicas
        ]

    def go_on(self, replica: SimReplica) -> None:
        """Contribute and merge what is due, or wait for it; then step on."""
        stay, recipe = self._swarm.stays[replica.index], self._swarm.recipe
        # A difference is taken from parameters that hold every earlier result, a gradient from before.
        merges_first = recipe.payload != "gradient"
        while stay.due:
            if merges_first and not self._merge_due(replica, stay.due[0].fragment):
                return
            self._contribute(replica, stay.due.pop(0))
        if self._merge_due(replica):
            self._begin_step(replica)

    def on_result(self, round: SimRound) -> None:
        """Finish a round: late peers catch up, and peers that waited for it continue."""
        for member in [*round.arrived, *sorted(round.watchers)]:
            replica = self._swarm.replicas[member]
            if member in round.arrived and member not in round.members:
                self._lateness.left_out(replica, round)
            self.go_on_after(round, replica)

    def go_on_after(self, round: SimRound, replica: SimReplica) -> None:
        """If that is the round that it waits for."""
        if self._swarm.stays[replica.index].blocked is round:
            self.go_on(replica)

    # steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self, replica: SimReplica) -> None:
        if self._swarm.draining:
            return
        seconds, fraction = self._times.draw(replica)
        life, clock = replica.life, self._swarm.clock
        replica.busy_s += seconds
        self._swarm.stays[replica.index].busy_until_s = clock.now + seconds
        clock.at(clock.now + seconds, lambda: self._end_step(replica, life, fraction))

    def _end_step(self, replica: SimReplica, life: int, fraction: float) -> None:
        if replica.life != life or not replica.present:
            return
        swarm, stay = self._swarm, self._swarm.stays[replica.index]
        if replica.learner is not None:
            _, norm = replica.learner.step(swarm.learning_rate(replica), fraction)
            if (votes := swarm.recipe.votes) is not None:
                replica.vote_state, replica.vote = votes.vote(replica.vote_state, norm)
        replica.count_step(round(fraction * swarm.pace.tokens_per_step))
        swarm.tally.steps += 1
        self._on_step(swarm.tally.steps, swarm.clock.now)
        stay.stepped_s = swarm.clock.now
        stay.due += self._events(replica)
        self.go_on(replica)

    def _events(self, replica: SimReplica) -> Sequence[Event]:
        return self._schedules[replica.index].events(replica.position) or self._lateness.last_chance(replica)

    # rounds -------------------------------------------------------------------------------------------------------

    def _contribute(self, replica: SimReplica, event: Event) -> None:
        swarm = self._swarm
        round = self._exchanges.gathering.round_for(replica.index, replica.side, event)
        if round is None:
            self._lateness.catch_up(replica)
            return
        overlapped = event.apply_step > event.send_step
        contribution = self._contribution(replica, round, overlapped=overlapped)
        swarm.sync.begin_early(replica, len(swarm.present(replica.side)))
        swarm.tally.contributions += 1
        swarm.stays[replica.index].pending.append((event.apply_step, round, contribution))
        self._exchanges.arrive(round, replica, contribution)

    def _contribution(self, replica: SimReplica, round: SimRound, *, overlapped: bool) -> Contribution:
        swarm, ratios = self._swarm, self._swarm.division.payload_ratios
        rate = swarm.learning_rate(replica, just_made=True)
        contribution = swarm.sync.contribute(replica, round.fragment, round.number, rate, overlapped=overlapped)
        if ratios is not None and replica.learner is None:  # a learner has thinned it when it encoded it
            return swarm.sync.thinned(contribution, ratios[replica.index])
        return contribution

    def _merge_due(self, replica: SimReplica, fragment: int | None = None) -> bool:
        """False if it has to wait; all results for `fragment` are due, or what is on its way would be sent twice."""
        stay = self._swarm.stays[replica.index]
        stay.blocked = None
        for entry in list(stay.pending):
            apply_step, round, contribution = entry
            if apply_step > replica.position and round.fragment != fragment:
                continue
            if round.state != "done":
                stay.blocked = round
                return False
            stay.pending.remove(entry)
            if round.outcome is not None:
                self._swarm.sync.merge(replica, round.outcome, contribution, round.fragment)
        return True
