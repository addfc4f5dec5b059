"""The virtual clock: peers step, contribute, wait, merge, leave and return, in the order of simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from peer.errors import UserError
from peer.outer.allocate import AdaptiveTopK, TimeBalanced
from peer.outer.merging import Eager
from peer.outer.recipes import Recipe, Schedule
from peer.outer.schedules import Event, GradientChange
from peer.outer.straggler import Backup, ComputeTimeout, Quorum, WaitAll, waits_for_all
from peer.outer.timeout import choose_timeout
from peer.outer.topology import Links
from peer.sim.network import reduce_seconds
from peer.sim.overlap import WHOLE, Layer, pipelined
from peer.sim.replica import Replica
from peer.sim.rounds import Exchange, Gathering, Round
from peer.sim.scenario import Partition, PeerProfile
from peer.sim.sync import Contribution, Synchroniser

VOTE_BYTES = 1.0
MICRO_BATCHES = 8
TIMED_STEPS = 50  # from which a compute timeout is chosen
MAX_EVENTS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a simulation lasts and how fast time goes.

    Attributes:
        goal_steps: inner steps of all peers together.
        step_s: seconds of one inner step of a peer of speed 1.
        tokens_per_step: of one peer.
        learning_rate: (steps of the swarm so far / peers, steps since the peer joined) -> rate.
        layers: of each fragment, which travel one by one while the steps before and after go on; none: all at once.
    """

    goal_steps: int
    step_s: float
    tokens_per_step: int
    learning_rate: Callable[[float, int], float]
    layers: Sequence[Sequence[Layer]] = ()


@dataclass
class Tally:
    """Counts of one simulation."""

    steps: int = 0
    committed: int = 0
    aborted: int = 0
    late: int = 0
    dropped: dict[int, int] = field(default_factory=dict)
    contributions: int = 0
    joins: int = 0
    leaves: int = 0
    heals: int = 0
    events: int = 0


@dataclass(eq=False)
class Stay:
    """What a present peer waits for.

    Attributes:
        pending: merges, in order of the steps after which they are due.
        blocked: the round whose result it waits for.
        stepped_s: when its last step was over.
        busy_until_s: when the step that it makes will be over.
        link_free_s: when its link has carried what it exchanges.
        due: contributions that it makes once the merges before them are done.
    """

    pending: list[tuple[int, Round, Contribution]] = field(default_factory=list)
    blocked: Round | None = None
    stepped_s: float = -math.inf
    busy_until_s: float = -math.inf
    link_free_s: float = -math.inf
    due: list[Event] = field(default_factory=list)


class Engine:
    """Runs one recipe on one swarm until the goal is reached.

    Args:
        recipe: what the swarm does.
        replicas: one per peer.
        sync: the mathematics.
        pace: goal and speed.
        partitions: times at which the swarm falls into sides.
        seed: of jitter and topology.
        hooks: what happens beside the clock.
    """

    def __init__(
        self,
        recipe: Recipe,
        replicas: Sequence[Replica],
        sync: Synchroniser,
        pace: Pace,
        hooks: Hooks,
        partitions: Sequence[Partition] = (),
        seed: int = 0,
    ) -> None:
        self.recipe, self.replicas, self.sync, self.pace, self.hooks = recipe, list(replicas), sync, pace, hooks
        self.now, self.tally = 0.0, Tally()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stays = [Stay() for _ in replicas]
        self._random = [random.Random(f"{seed}/{replica.index}") for replica in replicas]
        profiles = [replica.profile for replica in replicas]
        links = _links(profiles)
        self._steps_of, shares = self._allocate(profiles, links)
        self._ratios: list[float] | None = None  # of each peer's payload to the one that the recipe names
        if isinstance(recipe.allocator, AdaptiveTopK):
            self._ratios = [ratio / recipe.allocator.base_ratio for ratio in recipe.allocator.ratios(links)]
        self._exchange = Exchange(recipe, profiles, shares)
        self._timeout = self._chosen_timeout(profiles, seed)
        self._gathering = Gathering(recipe, seed, self._present, links)
        self._schedules = [self._schedule_of(replica.index) for replica in replicas]
        self._draining = False
        self._partitions = list(partitions)
        self._sides: dict[Round, int] = {}

    # the clock ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the goal is reached and every exchange is over; then one last round of what nobody has sent yet."""
        for replica in self.replicas:
            for joins, leaves in replica.profile.presence:
                self._at(joins, lambda r=replica: self._join(r))  # type: ignore[misc]
                if math.isfinite(leaves):
                    self._at(leaves, lambda r=replica: self._leave(r))  # type: ignore[misc]
        for partition in self._partitions:
            self._at(partition.start_s, lambda p=partition: self._split(p))  # type: ignore[misc]
            if math.isfinite(partition.end_s):
                self._at(partition.end_s, self._heal)
        while self._queue and not (self._draining and self._quiet()):
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.tally.events += 1
            if self.tally.events > MAX_EVENTS:
                raise UserError(f"more than {MAX_EVENTS} events", "fewer peers, or fewer tokens")
        if self.tally.steps < self.pace.goal_steps:
            raise UserError(
                f"the swarm died after {self.tally.steps} of {self.pace.goal_steps} steps: nobody was left, "
                "or everybody waited for somebody",
                "give the scenario peers that stay, or the recipe a straggler deadline",
            )
        self._finish()

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._order), action))

    def _quiet(self) -> bool:
        return all(round.state != "exchanging" for round in self._sides)

    def _present(self, side: int) -> list[int]:
        return [replica.index for replica in self.replicas if replica.present and replica.side == side]

    # steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self, replica: Replica) -> None:
        if self._draining:
            return
        seconds, fraction = self._step_seconds(replica)
        life = replica.life
        replica.busy_s += seconds
        self._stays[replica.index].busy_until_s = self.now + seconds
        self._at(self.now + seconds, lambda: self._end_step(replica, life, fraction))

    def _step_seconds(self, replica: Replica) -> tuple[float, float]:
        """Seconds of the next step and the fraction of the batch computed in them."""
        base = self.pace.step_s * self.recipe.gradients_per_step / replica.profile.speed
        draw = self._random[replica.index].lognormvariate
        jitter = replica.profile.jitter
        policy = self._timeout
        if policy is None:
            return (base * draw(-jitter * jitter / 2, jitter) if jitter else base), 1.0
        each = base / MICRO_BATCHES
        times = [each * (draw(-jitter * jitter / 2, jitter) if jitter else 1.0) for _ in range(MICRO_BATCHES)]
        count = max(1, policy.count(times))  # the first micro-batch is always finished
        return sum(times[:count]), count / MICRO_BATCHES

    def _chosen_timeout(self, profiles: Sequence[PeerProfile], seed: int) -> ComputeTimeout | None:
        """DropCompute's tau: the recipe's, or the best for micro-batch times as these peers have them."""
        policy = self.recipe.straggler
        if not isinstance(policy, ComputeTimeout):
            return None
        if policy.tau_s is None:
            drawn = np.random.default_rng(seed).standard_normal((TIMED_STEPS, len(profiles), MICRO_BATCHES))
            jitter = np.array([profile.jitter for profile in profiles])[:, None]
            each = self.pace.step_s / MICRO_BATCHES / np.array([profile.speed for profile in profiles])[:, None]
            payload = self.sync.wire_bytes(0)
            communication_s = reduce_seconds(profiles, payload, payload) if len(profiles) > 1 else 0.0
            samples = each * np.exp(jitter * drawn - jitter**2 / 2)
            policy = replace(policy, tau_s=choose_timeout(samples, communication_s))
        assert policy.tau_s is not None
        return policy if math.isfinite(policy.tau_s) else None

    def _end_step(self, replica: Replica, life: int, fraction: float) -> None:
        if replica.life != life or not replica.present:
            return
        if replica.learner is not None:
            rate = self.learning_rate(replica)
            _, norm = replica.learner.step(rate, fraction)
            if isinstance(self.recipe.schedule, GradientChange):
                replica.vote_state, replica.vote = self.recipe.schedule.vote(replica.vote_state, norm)
        replica.position += 1
        replica.steps += 1
        replica.steps_since_join += 1
        self.tally.steps += 1
        tokens = round(fraction * self.pace.tokens_per_step)
        for fragment in range(len(replica.unsent_tokens)):
            replica.unsent_tokens[fragment] += tokens
        if self.tally.steps >= self.pace.goal_steps:
            self._draining = True
        self.hooks.on_step(self)
        self._stays[replica.index].stepped_s = self.now
        self._stays[replica.index].due += self._events(replica)
        self._go_on(replica)

    def learning_rate(self, replica: Replica, *, just_made: bool = False) -> float:
        """The inner rate at the swarm's progress in steps of one peer; of the step `just_made`, or of the next."""
        steps = self.tally.steps - just_made
        return self.pace.learning_rate(max(0, steps) // len(self.replicas), replica.steps_since_join)

    def _events(self, replica: Replica) -> Sequence[Event]:
        schedule = self._schedules[replica.index]
        if isinstance(schedule, GradientChange):
            step = replica.position
            return (Event(fragment=0, round=step, send_step=step, apply_step=step),)
        return schedule.events(replica.position) or self._last_chance(replica)

    def _last_chance(self, replica: Replica) -> Sequence[Event]:
        """A round that waits for this peer, and whose deadline its next step would miss: it sends what it has."""
        policy = self.recipe.straggler
        if not isinstance(policy, WaitAll | Backup) or policy.deadline_s is None:
            return ()
        round = self._gathering.waiting_for(replica.index)
        step_s = self.pace.step_s * self.recipe.gradients_per_step / replica.profile.speed
        if round is None or self.now + step_s <= min(round.arrived.values()) + policy.deadline_s:
            return ()
        sent_at = round.number * self._steps_of[replica.index] if self._steps_of is not None else round.send_step
        replica.position = max(replica.position, sent_at)
        apply_step = replica.position + self.recipe.overlap_steps
        return (Event(fragment=round.fragment, round=round.number, send_step=sent_at, apply_step=apply_step),)

    # rounds -------------------------------------------------------------------------------------------------------

    def _contribute(self, replica: Replica, event: Event) -> None:
        round = self._gathering.round_for(replica.index, replica.side, event)
        if round is None:
            self._catch_up(replica)
            return
        overlapped = event.apply_step > event.send_step
        rate = self.learning_rate(replica, just_made=True)
        contribution = self.sync.contribute(replica, event.fragment, round.number, rate, overlapped=overlapped)
        if self._ratios is not None and replica.learner is None:
            contribution = self.sync.thinned(contribution, self._ratios[replica.index])
        if isinstance(self.recipe.merge, Eager) and overlapped and replica.learner is not None and event.round == 1:
            self.sync.eager_step(replica.learner, None, len(self._present(replica.side)), 0)
        self.tally.contributions += 1
        self._sides[round] = replica.side
        round.arrived[replica.index] = self.now
        round.contributions[replica.index] = contribution
        round.expected.add(replica.index)
        self._stays[replica.index].pending.append((event.apply_step, round, contribution))
        if self._may_decide(round):
            self._plan(round)

    def _may_decide(self, round: Round) -> bool:
        """False if the straggler policy's answer to an arrival is known: asking a thousand times a round is slow."""
        policy, arrived = self.recipe.straggler, len(round.arrived)
        if arrived == len(round.expected) or isinstance(policy, Backup):
            return True
        if waits_for_all(policy):
            return False
        # Who comes after the start is planned changes the members, not the start, and takes part: see `_plan`.
        return not round.planned and (not isinstance(policy, Quorum) or arrived >= policy.needed(len(round.expected)))

    def _plan(self, round: Round) -> None:
        """Ask the straggler policy when this round may start, as far as is known now."""
        round.attempt += round.state == "gathering"
        round.planned = False
        if round.state != "gathering" or not round.arrived:
            return
        decision = self.recipe.straggler.next_decision(sorted(round.expected), round.arrived, self._gathering.closed)
        if decision is None:
            return
        attempt, round.planned = round.attempt, True
        if decision.start_s <= self.now:
            self._start(round)
            return
        self._at(decision.start_s, lambda: self._start(round) if round.attempt == attempt else None)

    def _start(self, round: Round) -> None:
        round.members = members = tuple(sorted(round.arrived))
        self._gathering.started(round, self._sides[round])
        self._begin_exchange(round, members)

    def _begin_exchange(self, round: Round, members: tuple[int, ...]) -> None:
        round.state, round.members = "exchanging", members
        round.attempt += 1
        attempt = round.attempt
        seconds = self._delay_s(round)
        self._at(self.now + seconds, lambda: self._commit(round) if round.attempt == attempt else None)

    def _delay_s(self, round: Round) -> float:
        """Seconds until the members of an exchange that begins now need wait for it no longer."""
        latency_s, votes = self._exchange.latency_s(round), isinstance(self.recipe.schedule, GradientChange)
        if not self._wanted(round):
            return latency_s
        transfer_s = self._exchange.seconds(round, self.sync.wire_bytes(round.fragment)) - latency_s
        # Who waits for a deadline or a vote knows the members, or what they want, after the step alone.
        known = not votes and len(round.members) == len(round.expected) and self._has_just_stepped(round)
        speeds = [self.replicas[member].profile.speed for member in round.members]
        step_s = self.pace.step_s * self.recipe.gradients_per_step
        delay_s, link_free_s = pipelined(
            self.pace.layers[round.fragment] if self.pace.layers else WHOLE, transfer_s, latency_s,
            step_before_s=step_s / min(speeds) if known else 0.0, step_after_s=step_s / max(speeds),
            link_free_s=max(self._stays[member].link_free_s for member in round.members) - self.now,
        )
        for member in round.members:
            self._stays[member].link_free_s = self.now + link_free_s
        return delay_s

    def _has_just_stepped(self, round: Round) -> bool:
        """Whether the last member that came did so right after its step, and came last of all now."""
        last = next(reversed(round.arrived))
        return round.arrived[last] == self._stays[last].stepped_s == self.now

    def _free_links(self, round: Round) -> None:
        """Its exchange is broken off."""
        for member in round.members:
            stay = self._stays[member]
            stay.link_free_s = min(stay.link_free_s, self.now)

    def _wanted(self, round: Round) -> bool:
        return not isinstance(self.recipe.schedule, GradientChange) or any(
            self.replicas[member].vote for member in round.members
        )

    def _commit(self, round: Round) -> None:
        side = self._sides.pop(round)
        members = [self.replicas[member] for member in round.members]
        sent = [round.contributions[member] for member in round.members]
        if self._wanted(round):
            rate = self.learning_rate(members[0], just_made=True)
            round.outcome = self.sync.commit(members, sent, round.fragment, round.number, rate)
            traffic = self._exchange.traffic(round, self.sync.wire_bytes(round.fragment))
            self.tally.committed += 1
            self._count_dropped(round.outcome.dropped)
        else:
            traffic = dict.fromkeys(round.members, VOTE_BYTES * (len(round.members) - 1))
            for replica, contribution in zip(members, sent, strict=True):
                self.sync.give_back(replica, contribution, round.fragment)
        for member, num_bytes in traffic.items():
            self.replicas[member].bytes_sent += num_bytes
        round.state = "done"
        self._gathering.finished(round, side)
        for member in [*round.arrived, *sorted(round.watchers)]:
            if member in round.arrived and member not in round.members:
                self._late(self.replicas[member], round)
            elif self._stays[member].blocked is round:
                self._go_on(self.replicas[member])
        round.contributions.clear()  # what was decoded for the round takes memory, and plans are kept for a while

    def _go_on(self, replica: Replica) -> None:
        """Contribute and merge what is due, or wait for it; then step on."""
        stay = self._stays[replica.index]
        # A difference is taken from parameters that hold every earlier result; a gradient, and the estimate of an
        # eager update, from before.
        merges_first = self.recipe.payload != "gradient" and not isinstance(self.recipe.merge, Eager)
        while stay.due:
            if merges_first and not self._merge_due(replica, stay.due[0].fragment):
                return
            self._contribute(replica, stay.due.pop(0))
        if self._merge_due(replica):
            self._begin_step(replica)

    def _merge_due(self, replica: Replica, fragment: int | None = None) -> bool:
        """False if it has to wait; all results for `fragment` are due, lest what is under way be sent again."""
        stay = self._stays[replica.index]
        stay.blocked = None
        for entry in list(stay.pending):
            apply_step, round, contribution = entry
            if apply_step > replica.position and round.fragment != fragment:
                continue
            if round.state != "done":
                stay.blocked = round
                return False
            stay.pending.remove(entry)
            self._merge(replica, round, contribution)
        return True

    def _count_dropped(self, members: Sequence[int]) -> None:
        for member in members:
            self.tally.dropped[member] = self.tally.dropped.get(member, 0) + 1

    def _merge(self, replica: Replica, round: Round, contribution: Contribution) -> None:
        if round.outcome is not None:
            self.sync.merge(replica, round.outcome, contribution, round.fragment)

    def _late(self, replica: Replica, round: Round) -> None:
        """It arrived after the round had started without it."""
        stay = self._stays[replica.index]
        stay.pending = [entry for entry in stay.pending if entry[1] is not round]
        self.sync.give_back(replica, round.contributions[replica.index], round.fragment)
        self._catch_up(replica)
        if stay.blocked is round:
            self._go_on(replica)

    def _catch_up(self, replica: Replica) -> None:
        """The swarm went on without this peer: it takes the anchor with its own progress on top, and its pace."""
        self.tally.late += 1
        self._take_pace_of_others(replica)
        self.sync.carry_over(replica)
        if waits_for_all(self.recipe.straggler):
            self._excuse(replica)

    def _excuse(self, replica: Replica) -> None:
        """Nobody waits for it in the rounds that it has passed by."""
        for round in self._gathering.gathering():
            if round.state != "gathering" or replica.index not in round.expected - set(round.arrived):
                continue
            if round.number <= self._rounds_made([replica]) if self._steps_of else round.send_step <= replica.position:
                round.expected.discard(replica.index)
                self._plan(round)

    def _take_pace_of_others(self, replica: Replica) -> None:
        others = [r for r in self.replicas if r.present and r.side == replica.side and r is not replica]
        if not others:
            return
        replica.base_round = max(r.base_round for r in others)
        self._stand_at(replica, self._rounds_made(others))

    def _rounds_made(self, replicas: Sequence[Replica]) -> int:
        """Of the one who is ahead; in steps where all make equally many steps per round."""
        per_round = self._steps_of or [1] * len(self.replicas)
        # Who has yet to contribute at its step has not passed it.
        return max(((r.position - bool(self._stays[r.index].due)) // per_round[r.index] for r in replicas), default=0)

    def _stand_at(self, replica: Replica, rounds_made: int) -> None:
        replica.position = rounds_made * (self._steps_of[replica.index] if self._steps_of is not None else 1)

    # joining, leaving, splitting ----------------------------------------------------------------------------------

    def _join(self, replica: Replica) -> None:
        if replica.present or self._draining:
            return
        replica.present, replica.life, replica.arrived_s = True, replica.life + 1, self.now
        if self.now > 0.0 or replica.life > 1:
            self.tally.joins += 1
            others = [r for r in self.replicas if r.present and r is not replica and r.side == replica.side]
            donor = others[0] if others else None
            replica.unsent_tokens = [0] * len(replica.unsent_tokens)
            self._take_pace_of_others(replica)
            self.hooks.on_join(replica, donor)
            if donor is not None and self._clones:
                self._continue_as(replica, donor)
        self._go_on(replica)

    @property
    def _clones(self) -> bool:
        """Whether peers hold a state that no later anchor mends, so that a newcomer needs all of another's."""
        return self.recipe.payload == "gradient" or isinstance(self.recipe.merge, Eager)

    def _continue_as(self, replica: Replica, donor: Replica) -> None:
        """What is under way concerns the newcomer as it concerns the peer that it continues."""
        replica.position = donor.position
        self._stays[replica.index].pending = list(self._stays[donor.index].pending)
        for round in self._gathering.gathering():
            if donor.index in round.arrived:
                round.watchers.add(replica.index)
            elif donor.index in round.expected and round.state == "gathering":
                round.expected.add(replica.index)

    def _leave(self, replica: Replica) -> None:
        if not replica.present or self._draining:
            return
        replica.present, replica.life = False, replica.life + 1
        self._count_time(replica)
        self.tally.leaves += 1
        self._stays[replica.index] = Stay()
        for round in self._gathering.gathering():
            round.watchers.discard(replica.index)
            if replica.index not in round.expected and replica.index not in round.arrived:
                continue
            round.expected.discard(replica.index)
            round.arrived.pop(replica.index, None)
            round.contributions.pop(replica.index, None)
            if round.state == "exchanging" and replica.index in round.members:
                self.tally.aborted += 1
                self._without(round, replica)
            elif round.expected:
                self._plan(round)
            else:
                self._dissolve(round)

    def _without(self, round: Round, gone: Replica) -> None:
        """A member left during the exchange: the others make it again among themselves."""
        self._free_links(round)
        rest = tuple(member for member in round.members if member != gone.index)
        if rest:
            self._begin_exchange(round, rest)
        elif round.expected and not self._gathering.asynchronous:
            round.state, round.members, round.attempt = "gathering", (), round.attempt + 1
            self._plan(round)
        else:
            self._dissolve(round)

    def _dissolve(self, round: Round) -> None:
        self._give_up([round])
        for member in [*round.arrived, *sorted(round.watchers)]:
            if self._stays[member].blocked is round:
                self._go_on(self.replicas[member])

    def _give_up(self, rounds: Sequence[Round]) -> None:
        """The work of their members is carried by the next round."""
        self._gathering.forget(rounds)
        for round in rounds:
            self._free_links(round)
            round.state, round.attempt = "done", round.attempt + 1
            self._sides.pop(round, None)
            for member, contribution in round.contributions.items():
                self.sync.give_back(self.replicas[member], contribution, round.fragment)

    def _split(self, partition: Partition) -> None:
        for replica, side in zip(self.replicas, partition.side_of(len(self.replicas)), strict=True):
            replica.side = side
        self._restart_rounds()
        self.hooks.on_split(self)

    def _heal(self) -> None:
        if len({replica.side for replica in self.replicas}) == 1:
            return
        self.tally.heals += 1
        side = heaviest_side(self.replicas)
        winners = sorted((r for r in self.replicas if r.side == side), key=lambda r: (not r.present, r.index))
        losers = [replica for replica in self.replicas if replica.side != side]
        self.hooks.on_heal(winners[0], losers)
        for replica in self.replicas:
            replica.side = 0
        if self._clones:
            for replica in losers:
                self._stays[replica.index].pending = list(self._stays[winners[0].index].pending)
        self._restart_rounds()

    def _restart_rounds(self) -> None:
        """No exchange survives a change of who can reach whom; the work is carried by the next round."""
        rounds = self._gathering.gathering()
        self.tally.aborted += len(rounds)
        self._give_up(rounds)
        present = [replica for replica in self.replicas if replica.present]
        for stay in self._stays:
            stay.due = []
        rounds_made = self._rounds_made(present)
        for replica in present:
            self._stand_at(replica, rounds_made)
        for stay in self._stays:
            stay.pending = [entry for entry in stay.pending if entry[1].outcome is not None]
        for replica, stay in zip(self.replicas, self._stays, strict=True):
            if stay.blocked is not None and replica.present:
                self._go_on(replica)

    def _count_time(self, replica: Replica) -> None:
        """It is gone, or all is over: what it has not computed of its last step was never computed."""
        replica.present_s += self.now - replica.arrived_s
        replica.busy_s -= max(0.0, self._stays[replica.index].busy_until_s - self.now)

    # the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        for replica, stay in zip(self.replicas, self._stays, strict=True):
            if replica.present:
                self._count_time(replica)
                for _, round, contribution in stay.pending:
                    if round.state == "done" and not isinstance(self.recipe.merge, Eager):  # it had its own share
                        self._merge(replica, round, contribution)
        for round in self._gathering.gathering():
            for member, contribution in round.contributions.items():
                self.sync.give_back(self.replicas[member], contribution, round.fragment)
        present = [replica for replica in self.replicas if replica.present]
        if self.recipe.payload == "delta" and not isinstance(self.recipe.merge, Eager) and present:
            self._last_round(present)

    def _last_round(self, present: Sequence[Replica]) -> None:
        """What nobody has sent yet must be in the anchor that is evaluated."""
        sides = sorted({replica.side for replica in present})
        lasts_s = dict.fromkeys(sides, 0.0)  # groups exchange at the same time, fragments one after another
        for side in sides:
            own = [replica for replica in present if replica.side == side]
            for fragment in range(len(self.sync.fragments)):
                if all(replica.unsent_tokens[fragment] == 0 for replica in own):
                    continue
                number = 1 + self.tally.committed
                lasts_s[side] += max(
                    self._closing_exchange([self.replicas[member] for member in group], fragment, number)
                    for group in self.recipe.topology.groups(number, [r.index for r in own], 0, None)
                )
        self.now += max(lasts_s.values())

    def _closing_exchange(self, members: Sequence[Replica], fragment: int, number: int) -> float:
        """Returns its seconds."""
        round = Round(fragment, number, set(), members=tuple(replica.index for replica in members))
        rate = self.learning_rate(members[0])
        round.contributions = {
            r.index: self.sync.contribute(r, fragment, number, rate, overlapped=False) for r in members
        }
        sent = [round.contributions[member] for member in round.members]
        self._count_dropped(self.sync.commit(members, sent, fragment, number, rate).dropped)
        self.tally.committed += 1
        update_bytes = self.sync.wire_bytes(fragment)
        for member, num_bytes in self._exchange.traffic(round, update_bytes).items():
            self.replicas[member].bytes_sent += num_bytes
        return self._exchange.seconds(round, update_bytes)

    # work ---------------------------------------------------------------------------------------------------------

    def _allocate(
        self, profiles: Sequence[PeerProfile], links: Links
    ) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
        if not isinstance(self.recipe.allocator, TimeBalanced):
            return None, None
        speeds = [profile.speed / self.pace.step_s for profile in profiles]
        total = self.recipe.steps_per_round * len(profiles)
        work = self.recipe.allocator.allocate(speeds, links, total, max(1, int(self.sync.wire_bytes(0))))
        return tuple(max(1, steps) for steps in work.steps), work.shares

    def _schedule_of(self, peer: int) -> Schedule:
        if self._steps_of is None:
            return self.recipe.schedule
        return self.recipe.with_steps_per_round(self._steps_of[peer]).schedule


class Hooks:
    """What happens beside the clock; the default does nothing."""

    def on_step(self, engine: Engine) -> None:
        """After every inner step of any peer."""

    def on_join(self, replica: Replica, donor: Replica | None) -> None:
        """A peer that was not there from the start has come; `donor` is somebody on its side, if there is anybody."""

    def on_split(self, engine: Engine) -> None:
        """The swarm fell into sides."""

    def on_heal(self, winner: Replica, losers: Sequence[Replica]) -> None:
        """The sides can reach each other again; `winner` is somebody of the side that made more steps."""


def heaviest_side(replicas: Sequence[Replica]) -> int:
    """The side of a partition whose peers made the most steps; of equal ones the first."""
    steps: dict[int, int] = {}
    for replica in replicas:
        steps[replica.side] = steps.get(replica.side, 0) + replica.steps
    return max(sorted(steps), key=lambda side: steps[side])


def _links(profiles: Sequence[PeerProfile]) -> Links:
    unlimited = 1e15  # bytes/s
    return Links(
        up=tuple(min(profile.up_bytes_s, unlimited) for profile in profiles),
        down=tuple(min(profile.down_bytes_s, unlimited) for profile in profiles),
    )
