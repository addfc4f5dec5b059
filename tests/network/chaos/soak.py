"""G13: a soak. Eight peers live through mixed faults for hours; three of them, and the bootstrap, are never killed.

The others are killed (agent, daemon, whole peer), stopped, replaced by newcomers with new identities, and a hostile
peer tries one scripted attack after another. Watched in those that live on: memory of their own, and descriptors.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import own_cpu_seconds
from peer.link.supervisor import AgentProcess
from tests.network.chaos import attacks
from tests.network.chaos.observe import Digests, Hangs, Orphans, Process, family, tracebacks
from tests.network.chaos.swarm import ChaosSwarm, Seat

FAULTS = ("agent", "daemon", "peer", "newcomer", "stop", "attack")
STEADY = ("steady0", "steady1", "steady2")
CHURNED = 5
CORES = 1.5
OPEN_WITHIN_S, SETTLE_S = 600.0, 300.0
WARM_UP_S = 20 * 60.0
SAMPLE_S, TELL_S = 30.0, 60.0
SHORTEST_GAP_S, LONGEST_GAP_S = 1.0, 30.0
LONGEST_STOP_S = 20.0
ORPHANED_AFTER_S = 30.0  # on a machine that does other work, too
HANG_S = 240.0  # the deadline of a round, the pauses after two that an attack and a kill have spoiled, a busy machine


@dataclass
class Gauge:
    """What one process holds, over time.

    Attributes:
        samples: (seconds since the beginning, bytes of its own, descriptors).
    """

    name: str
    process: Process
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def read(self, seconds: float) -> None:
        """One more sample, while it lives."""
        if self.process.alive:
            folder = Path(f"/proc/{self.process.pid}")
            own = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("RssAnon"))
            self.samples.append((seconds, int(own.split()[1]) << 10, len(list((folder / "fd").iterdir()))))

    def slope(self, since: float, apart: float = SAMPLE_S) -> float:
        """Bytes per second: the median slope between any two samples (Theil and Sen): a peak bends it little."""
        late = [(t, size) for t, size, _ in self.samples if t >= since]
        slopes = [(b - a) / (t - s) for i, (s, a) in enumerate(late) for t, b in late[i + 1 :] if t - s >= apart]
        return median(slopes) if slopes else 0.0

    def slope_mb_per_h(self, since: float) -> float:
        return self.slope(since) * 3600 / 1e6

    def more_descriptors(self, since: float) -> float:
        """By how much the median of the last third is above that of the first."""
        late = [count for t, _, count in self.samples if t >= since]
        third = len(late) // 3
        return median(late[-third:]) - median(late[:third]) if third else 0.0

    def line(self, since: float) -> str:
        """For the report."""
        first, last = self.samples[0], self.samples[-1]
        return (
            f"{self.name}: {first[1] / 1e6:.1f} -> {last[1] / 1e6:.1f} MB, {self.slope_mb_per_h(since):+.2f} MB/h, "
            f"{self.more_descriptors(since):+g} descriptors of {last[2]}"
        )


class SoakSwarm(ChaosSwarm):
    """The steady ones run the production agent as it is started for anybody; the others are forked, and armed."""

    turn_s = 0.1

    def _agent(self, folder: Path) -> AgentProcess:
        return AgentProcess(folder / "agent.log") if folder.name in STEADY else super()._agent(folder)


class Soak:
    """The campaign over one swarm.

    Args:
        swarm: open; its first members are the steady ones.
        rng: what happens to whom, and when.
        cores: processors to use in the mean: faults wait for it.
        warm_up_s: left out of slopes.
    """

    def __init__(self, swarm: ChaosSwarm, rng: random.Random, cores: float, warm_up_s: float) -> None:
        self.swarm, self._rng, self._cores, self._warm_up_s = swarm, rng, cores, warm_up_s
        self.faults: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))
        self.orphans, self.hangs, self.digests = Orphans(ORPHANED_AFTER_S), Hangs(HANG_S), Digests()
        self.began, self._cpu_at = time.monotonic(), cpu_seconds()
        self._next_fault, self._next_sample = self.began, 0.0
        self._halts: list[tuple[float, Seat, list[Process]]] = []
        self._newcomers = 0
        self.steady = swarm.seats[: len(STEADY)]
        self.gauges = list(self._gauges())
        ids = [seat.member.peer_id for seat in self.steady[:2]]
        bootstrap = swarm.bootstraps[0]
        self._attacker = attacks.AttackerProcess(swarm.folder / "attacker", bootstrap.address, bootstrap.run_id, ids)
        self._attacking = True  # until it says that it is there

    def _gauges(self) -> Iterator[Gauge]:
        for seat in self.steady:
            yield from (Gauge(f"{seat.name} {what}", each)
                        for what, each in zip(("agent", "daemon"), seat.processes, strict=False))  # fmt: skip
        for what, each in zip(("bootstrap", "its daemon"), family(self.swarm.bootstraps[0].process.pid), strict=False):
            yield Gauge(what, each)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def counts(self) -> dict[str, Any]:
        """What has happened so far."""
        since = min(self._warm_up_s, self.seconds / 2)
        logged = [trouble for seat in self.steady for trouble in tracebacks(seat.member.log_text())]
        return {
            "soak_minutes": round(self.seconds / 60, 1),
            "faults": self.faults.total(),
            "faults_by_kind": dict(self.faults),
            "cores_used": [round((cpu_seconds() - self._cpu_at) / self.seconds, 2)],
            "rounds": len(self.digests.rounds),
            "largest_slope_mb_per_h": round(max(gauge.slope_mb_per_h(since) for gauge in self.gauges), 2),
            "largest_descriptor_growth": max(gauge.more_descriptors(since) for gauge in self.gauges),
            "watched": [gauge.line(since) for gauge in self.gauges],
            "steady_deaths": sum(not gauge.process.alive for gauge in self.gauges),
            "steady_tracebacks": len(logged),
            "what_was_logged": [each.splitlines()[-1] for each in logged],
            **self.hangs.counts(),
            **self.orphans.counts(),
            **self.digests.counts(),
        }

    # -- one turn ----------------------------------------------------------------------------------------------------

    def turn(self, more: bool) -> None:
        """Go on by one turn; with `more`, with further faults."""
        self.swarm.tick()
        now = time.monotonic()
        for halt in [halt for halt in self._halts if now >= halt[0]]:
            self._resume(halt)
        self.orphans.check()
        if self._attacking and self._attacker.answer() is not None:
            self._attacking = False
        if more and now >= self._next_fault and self._below_share():
            self._next_fault = now + self._rng.uniform(SHORTEST_GAP_S, 2 * SHORTEST_GAP_S)
            self._fault()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            self._sample()

    def _sample(self) -> None:
        for seat in self.swarm.seats:
            self.digests.add(seat.name, seat.member.records)
        self.digests.compare_states(self.swarm.seats)
        for gauge in self.gauges:
            gauge.read(self.seconds)
        self.hangs.check(self.swarm.seats, len(self.digests.rounds))

    def _below_share(self) -> bool:
        overdue = time.monotonic() - self._next_fault > LONGEST_GAP_S
        return overdue or cpu_seconds() - self._cpu_at < self._cores * self.seconds

    def _resume(self, halt: tuple[float, Seat, list[Process]]) -> None:
        self._halts.remove(halt)
        for each in halt[2]:
            each.resume()
        halt[1].halted, halt[1].since = False, time.monotonic()

    def _fault(self) -> None:
        kind = min(self._rng.sample(FAULTS, len(FAULTS)), key=self.faults.__getitem__)
        if kind == "attack":
            if not self._attacking:
                ids = [seat.member.peer_id for seat in self.steady[:2]]
                name = self._rng.choice(attacks.every())
                self._attacker.ask(attack=name, honest=ids, seed=self._rng.randrange(2**32))
                self._attacking = True
            self.faults[kind] += 1  # one that goes on counts, too: others must not wait for it
            return
        live = [seat for seat in self.swarm.seats if seat not in self.steady and seat.live and seat.processes]
        if len(live) <= 1:
            return
        self.faults[kind] += 1
        seat = self._rng.choice(live)
        processes = seat.processes
        if kind == "stop":
            seat.halted = True
            for each in processes:
                each.send(signal.SIGSTOP)
            self._halts.append((time.monotonic() + self._rng.uniform(1.0, LONGEST_STOP_S), seat, processes))
            return
        processes[-1 if kind == "daemon" else 0].send(signal.SIGKILL)
        self.orphans.watch(processes)
        seat.since = time.monotonic()
        if kind == "peer":
            self.swarm.relaunch(seat)
        elif kind == "newcomer":
            self.swarm.retire(seat)
            self._newcomers += 1
            self.swarm.open(f"newcomer{self._newcomers}")

    def finish(self) -> None:
        """No more faults: all go on, and hold the same bytes."""
        for halt in list(self._halts):
            self._resume(halt)
        deadline = time.monotonic() + SETTLE_S
        while not self.swarm.settled() or self.orphans.waiting:
            if time.monotonic() > deadline:
                self.hangs.found.append(f"the swarm did not settle: {self.swarm.where()}")
                break
            self.turn(more=False)
        self._sample()
        self._attacker.close()


def cpu_seconds() -> float:
    """Processor time of this process and of all below it, as far as the kernel still tells."""
    total = sum(os.times()[:4])
    for each in family(os.getpid())[1:]:
        with contextlib.suppress(OSError):  # it has ended since
            total += own_cpu_seconds(each.pid)
    return total


def run(
    seed: int, folder: Path, *, minutes: float, cores: float = CORES, churned: int = CHURNED, steps: int = 40,
    pace_s: float = 0.25, warm_up_s: float = WARM_UP_S, at_least: int = 0,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Let faults happen for so many minutes; -> counts.

    Args:
        cores: see `Soak`.
        churned: members that faults happen to.
        steps, pace_s: of each member: a round, and seconds between two steps.
        at_least: faults, however long they take.
    """
    swarm = SoakSwarm(folder, steps=steps, pace_s=pace_s)
    try:
        swarm.open(*STEADY, *(f"peer{number}" for number in range(churned)))
        swarm.run_until(swarm.settled, OPEN_WITHIN_S)
        soak = Soak(swarm, random.Random(seed), cores, warm_up_s)
        tell_at = time.monotonic() + TELL_S
        while soak.seconds < 60 * minutes or soak.faults.total() < at_least:
            soak.turn(more=True)
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + TELL_S
                tell(soak.counts())
        soak.finish()
        return soak.counts()
    finally:
        swarm.close()
