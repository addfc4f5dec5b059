"""Kills and rejoins: what an agent that lives on holds more after each of them.

One peer is killed as soon as it has been in a round: alternately its agent, which its trainer starts again under its
old identity, and the whole peer, which a newcomer replaces. Two others, and the bootstrap, are never touched.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.network.chaos.observe import family, tracebacks
from tests.network.chaos.soak import STEADY, Gauge, SoakSwarm
from tests.network.chaos.swarm import Seat

KILLS = 600
MEMBERS = STEADY[:2]
OPEN_WITHIN_S, BACK_WITHIN_S = 600.0, 120.0
TELL_EVERY = 10
APART = 20  # kills, of two samples that make a slope


class Rejoins:
    """The campaign over one swarm: open, the last seat being the one that is killed."""

    def __init__(self, swarm: SoakSwarm) -> None:
        self.swarm, self.kills, self.began = swarm, 0, time.monotonic()
        self.steady, self.seat = swarm.seats[:-1], swarm.seats[-1]
        watched = [(seat.name, seat.processes) for seat in self.steady]
        self.gauges = [
            Gauge(f"{name} {what}", process)
            for name, processes in watched
            for what, process in zip(("agent", "daemon"), processes, strict=False)
        ]
        bootstrap = family(swarm.bootstraps[0].process.pid)
        self.gauges += [Gauge(what, each) for what, each in zip(("bootstrap", "its daemon"), bootstrap, strict=False)]

    def one(self) -> None:
        """Wait until the peer is in a round with the others, read what the others hold, and kill it."""
        before = len(self.seat.member.committed)
        self.swarm.run_until(lambda: self.seat.live and len(self.seat.member.committed) > before, BACK_WITHIN_S)
        for gauge in self.gauges:
            gauge.read(self.kills)
        self.kills += 1
        self.seat.processes[0].send(signal.SIGKILL)
        if self.kills % 2:
            self._replace()

    def _replace(self) -> None:
        self.swarm.retire(self.seat)
        self.seat: Seat = self.swarm.open(f"visitor{self.kills}")[0]

    def counts(self) -> dict[str, Any]:
        """What has happened so far; slopes are those of the second half."""
        since = self.kills / 2
        agents = [gauge for gauge in self.gauges if gauge.name.endswith("agent")]
        others = [gauge for gauge in self.gauges if gauge not in agents]
        return {
            "rejoins": self.kills,
            "rounds": max(seat.member.round for seat in self.steady),
            "largest_kb_per_kill": round(max(kb_per_kill(gauge, since) for gauge in agents), 2),
            "largest_other_kb_per_kill": round(max(kb_per_kill(gauge, since) for gauge in others), 2),
            "largest_descriptor_growth": max(gauge.more_descriptors(since) for gauge in self.gauges),
            "watched": [line(gauge, since) for gauge in self.gauges],
            "steady_deaths": sum(not gauge.process.alive for gauge in self.gauges),
            "steady_tracebacks": sum(len(tracebacks(seat.member.log_text())) for seat in self.steady),
            "samples": {gauge.name: gauge.samples[::TELL_EVERY] for gauge in self.gauges},
        }


def kb_per_kill(gauge: Gauge, since: float) -> float:
    """The slope of what a process holds of its own."""
    return gauge.slope(since, APART) / 1e3


def line(gauge: Gauge, since: float) -> str:
    """For the report."""
    (_, first, before), (_, last, after) = gauge.samples[0], gauge.samples[-1]
    return (
        f"{gauge.name}: {first / 1e6:.1f} -> {last / 1e6:.1f} MB, {kb_per_kill(gauge, since):+.2f} kB a kill, "
        f"{before} -> {after} descriptors"
    )


def run(
    folder: Path, *, kills: int = KILLS, minutes: float = 60.0, steps: int = 8, pace_s: float = 0.05,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Kill and let rejoin, as often as the minutes allow; -> counts."""
    swarm = SoakSwarm(folder, steps=steps, pace_s=pace_s)
    try:
        swarm.open(*MEMBERS, "visitor")
        swarm.run_until(swarm.settled, OPEN_WITHIN_S)
        rejoins = Rejoins(swarm)
        deadline = time.monotonic() + 60 * minutes
        while rejoins.kills < kills and time.monotonic() < deadline:
            rejoins.one()
            if rejoins.kills % TELL_EVERY == 0:
                tell(rejoins.counts())
        return rejoins.counts()
    finally:
        swarm.close()
