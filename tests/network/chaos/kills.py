"""G3: SIGKILL in every phase of a round, again and again, while the others go on.

A victim stops itself in the phase that it is to die in (`gated`), so that it is known to be there; then its agent or
its libp2p daemon is killed. Either the trainer lives and starts the next agent over the same memory, or the whole peer
starts again from its folder.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.network.chaos.gated import PHASES, arm, disarm
from tests.network.chaos.observe import Digests, Hangs, Orphans
from tests.network.chaos.swarm import ChaosSwarm, Seat

VICTIMS = ("agent", "daemon", "peer")
# Straggler window, time to answer it, the deadline of an exchange (20 s in the harness), and a pause of 15 s for who
# was left alone: no healthy member can take longer from one record to the next.
HANG_S = 60.0
SETTLE_S = 120.0
REACH_S = 60.0
LONGEST_INSIDE_S = 0.2
COMPARE_EVERY_S = 1.0
UNTOUCHED = 4
"""Of eight members. With fewer than two fifths of those of the last rounds, others follow after ten minutes only
(docs/security.md), and a member that is starting again is none of them, which takes longer on a slow machine.
"""


@dataclass
class Attempt:
    """One member on its way into the phase that it will be killed in."""

    seat: Seat
    phase: str
    victim: str
    since: float = field(default_factory=time.monotonic)


class Killer:
    """The campaign over one swarm.

    Args:
        swarm: all members have begun.
        rng: which phase of whom is next, and how far inside.
        at_once: members that may be on their way to death at the same time.
        untouched: members that take part and shall live, at any moment.
        before: kills by phase that an earlier part of the campaign has made.
    """

    def __init__(
        self, swarm: ChaosSwarm, rng: random.Random, at_once: int, untouched: int,
        before: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.swarm, self._rng, self._at_once, self._untouched = swarm, rng, at_once, untouched
        self.kills: Counter[str] = Counter(dict.fromkeys(PHASES, 0))
        self.victims: Counter[str] = Counter(dict.fromkeys(VICTIMS, 0))
        self._before = Counter(before)
        self.missed = 0
        self.orphans, self.hangs, self.digests = Orphans(), Hangs(HANG_S), Digests()
        self._attempts: list[Attempt] = []
        self._killed_after: dict[str, int] = {}  # its records then
        self._compare_at = 0.0

    def lacks(self, budget: int) -> bool:
        """Whether there are fewer kills than that, or a phase has not had its share of them."""
        kills = [self.kills[phase] + self._before[phase] for phase in PHASES]
        return sum(kills) < budget or min(kills) < budget // len(PHASES)

    def counts(self) -> dict[str, Any]:
        """What has happened so far."""
        return {
            "kills_per_phase": dict(self.kills),
            "kills_per_victim": dict(self.victims),
            "rounds": len(self.digests.rounds),
            **self.hangs.counts(),
            **self.orphans.counts(),
            **self.digests.counts(),
            "failed_starts": sum(seat.failed_starts for seat in self.swarm.seats),
            "phases_not_reached": self.missed,
        }

    def turn(self, more: bool) -> None:
        """Go on by one turn; with `more`, choose further victims."""
        self.swarm.tick()
        for attempt in list(self._attempts):
            self._advance(attempt)
        if more and len(self._attempts) < self._at_once:
            self._choose()
        self.orphans.check()
        for seat in self.swarm.seats:
            self.digests.add(seat.name, seat.member.records)
        if time.monotonic() >= self._compare_at:
            self._compare_at = time.monotonic() + COMPARE_EVERY_S
            self.digests.compare_states(self.swarm.seats)
        for seat in self.hangs.check(self.swarm.seats, len(self.digests.rounds)):
            for each in seat.processes[:1]:
                each.send(signal.SIGUSR1)  # its log then tells what it waits for

    def finish(self) -> None:
        """Make the kills that are under way, and wait until all members are back and hold the same bytes."""
        deadline = time.monotonic() + SETTLE_S
        while self._attempts or self.orphans.waiting or not self.swarm.settled():
            if self._attempts:
                deadline = time.monotonic() + SETTLE_S
            elif time.monotonic() > deadline:
                self.hangs.found.append(f"the swarm did not settle: {self.swarm.where()}")
                return
            self.turn(more=False)
        self.digests.compare_states(self.swarm.seats)

    # -- one kill ----------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        busy = [attempt.seat for attempt in self._attempts]
        here = [seat for seat in self.swarm.seats if seat.live and self._takes_part(seat) and seat not in busy]
        if len(here) <= self._untouched:
            return
        phases = self._rng.sample(PHASES, len(PHASES))
        wanted = min(phases, key=lambda phase: self.kills[phase] + self._before[phase] + self._under_way(phase))
        # who is to die while it catches up is killed anywhere first, and then on its way back
        phase = "train" if wanted == "catch_up" else wanted
        self._arm(self._rng.choice(here), phase)

    def _takes_part(self, seat: Seat) -> bool:
        """Whether it is where the others are, since it was killed last."""
        since = seat.member.records[self._killed_after.get(seat.name, 0) :]
        return any(record.status in ("committed", "caught_up") for record in since)

    def _under_way(self, phase: str) -> int:
        return sum(attempt.phase == phase for attempt in self._attempts)

    def _arm(self, seat: Seat, phase: str) -> None:
        delay_s = self._rng.choice([0.0, self._rng.uniform(0.0, LONGEST_INSIDE_S)])
        arm(seat.member.folder, phase, delay_s)
        victim = min(self._rng.sample(VICTIMS, len(VICTIMS)), key=self.victims.__getitem__)
        self._attempts.append(Attempt(seat, phase, victim))

    def _advance(self, attempt: Attempt) -> None:
        seat = attempt.seat
        processes = seat.processes
        if processes and processes[0].stopped:
            self._attempts.remove(attempt)
            self._kill(attempt)
        elif time.monotonic() - attempt.since > REACH_S and seat.live:
            self._attempts.remove(attempt)
            self.missed += 1
            attempt.phase = ""
            self._kill(attempt)  # whatever it is armed for must not happen to the next attempt

    def _kill(self, attempt: Attempt) -> None:
        seat, phase = attempt.seat, attempt.phase
        processes = seat.processes
        disarm(seat.member.folder)
        if attempt.victim == "daemon" and len(processes) > 1:
            processes[1].send(signal.SIGKILL)  # the agent must notice and end by itself
            processes[0].resume()
        else:
            processes[0].send(signal.SIGKILL)
        if phase:
            self.kills[phase] += 1
            self.victims[attempt.victim] += 1
        self.orphans.watch(processes)
        self._killed_after[seat.name] = len(seat.member.records)
        seat.since = time.monotonic()
        if phase and self.kills["catch_up"] + self._under_way("catch_up") <= min(self.kills.values()):
            self._arm(seat, "catch_up")
        if attempt.victim == "peer" or not seat.begun:
            self.swarm.relaunch(seat)


def run(
    seed: int, budget: int, swarm: ChaosSwarm, *, at_once: int = 2, untouched: int = UNTOUCHED, minutes: float = 60.0,
    rounds: int = 0, before: Mapping[str, int] = MappingProxyType({}),
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Kill until there are `budget` kills and every phase has had its share, as far as the minutes allow; -> counts.

    Args:
        swarm: open; its members have begun.
        rounds: commit at least as many.
        before: see `Killer`.
        tell: called with the counts now and then.
    """
    killer = Killer(swarm, random.Random(seed), at_once, untouched, before)
    deadline, tell_at = time.monotonic() + 60 * minutes, 0.0
    while time.monotonic() < deadline and (killer.lacks(budget) or len(killer.digests.rounds) < rounds):
        killer.turn(more=killer.lacks(budget))
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + 10.0
            tell(killer.counts())
    killer.finish()
    return killer.counts()
