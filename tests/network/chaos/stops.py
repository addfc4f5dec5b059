"""G4: peers that are stopped for a while (SIGSTOP, as by a closed lid), and one that is ten times slower.

The others must commit by their deadline, and a member that was stopped must be back two rounds after it goes on; later
only while the others refuse it for the rounds that its earlier stops cost them.
"""

from __future__ import annotations

import math
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from peer.outer.record import RoundRecord
from tests.network.chaos.observe import Digests, Process
from tests.network.chaos.swarm import ChaosSwarm, Seat

WHAT = ("peer", "agent", "daemon")
OTHERS_WITHIN_S = 60.0  # window, time to answer it, the exchange's deadline of 20 s and the pauses after it
BACK_WITHIN_S = 120.0
BACK_WITHIN_ROUNDS = 2
SLOWER = 10
REFUSED = re.compile(r"^(\S+ \S+) WARNING \S+: (\S+) gets no seat from this peer for (\d+) s(?: \(|$)", re.MULTILINE)
LOG_TIME = "%Y-%m-%d %H:%M:%S,%f"


@dataclass
class Halt:
    """One member that stands still.

    Attributes:
        ends: when it goes on; monotonic.
        others: the rest of the swarm, with the number of rounds that each had committed; less those that went on.
        round: of the swarm when the member went on; None before.
    """

    seat: Seat
    processes: list[Process]
    ends: float
    others: dict[str, int]
    began: float = field(default_factory=time.monotonic)
    round: int | None = None
    mark: int = 0


class Stopper:
    """The campaign over one swarm."""

    def __init__(self, swarm: ChaosSwarm, rng: random.Random, shortest_s: float, longest_s: float) -> None:
        self.swarm, self._rng, self._span = swarm, rng, (math.log(shortest_s), math.log(longest_s))
        self.stops: Counter[str] = Counter(dict.fromkeys(WHAT, 0))
        self.seconds = 0.0
        self.late_others: list[str] = []
        self.returns: Counter[str] = Counter()
        self.late_returns: list[str] = []
        self.refused_returns = 0
        self.slow_rounds = 0
        self.longest_others_s = 0.0
        self.digests = Digests()
        self._halts: list[Halt] = []

    def counts(self) -> dict[str, Any]:
        """What has happened so far."""
        return {
            "stops": self.stops.total(),
            "stops_by_what": dict(self.stops),
            "seconds_stopped": round(self.seconds, 1),
            "rounds": len(self.digests.rounds),
            "late_others": len(self.late_others),
            "who_was_late": self.late_others,
            "longest_until_the_others_committed_s": round(self.longest_others_s, 1),
            "rounds_until_back": dict(self.returns),
            "late_returns": len(self.late_returns),
            "what_returned_late": self.late_returns,
            "refused_returns": self.refused_returns,
            "slow_peer_rounds": self.slow_rounds,
            "digests_compared": self.digests.compared,
            "digest_mismatches": len(self.digests.mismatches),
        }

    @property
    def busy(self) -> int:
        return len(self._halts)

    def stop_one(self) -> None:
        """Stop a member that is not stopped."""
        seats = [seat for seat in self.swarm.seats if seat.live and seat not in [halt.seat for halt in self._halts]]
        seat, what = self._rng.choice(seats), self._rng.choice(WHAT)
        both = seat.processes
        chosen = {"peer": both, "agent": both[:1], "daemon": both[1:]}[what]
        seconds = math.exp(self._rng.uniform(*self._span))
        others = {each.name: len(each.member.committed) for each in seats if each is not seat}
        seat.halted = True
        for process in chosen:
            process.send(signal.SIGSTOP)
        self.stops[what] += 1
        self.seconds += seconds
        self._halts.append(Halt(seat, chosen, time.monotonic() + seconds, others))

    def turn(self) -> None:
        """Go on by one turn."""
        self.swarm.tick()
        for seat in self.swarm.seats:
            self.digests.add(seat.name, seat.member.records)
        for halt in list(self._halts):
            self._watch_others(halt)
            if halt.round is None and time.monotonic() >= halt.ends:
                self._let_go_on(halt)
            elif halt.round is not None and not halt.others and self._is_back(halt, halt.round):
                self._halts.remove(halt)

    def _watch_others(self, halt: Halt) -> None:
        waited_s = time.monotonic() - halt.began
        for seat in self.swarm.seats:
            before = halt.others.get(seat.name)
            if before is None:
                continue
            if seat.halted or len(seat.member.committed) > before:
                halt.others.pop(seat.name)
                self.longest_others_s = max(self.longest_others_s, waited_s if not seat.halted else 0.0)
            elif waited_s > OTHERS_WITHIN_S:
                halt.others.pop(seat.name)
                self.late_others.append(f"{seat.name}, while {halt.seat.name} stood still")

    def _let_go_on(self, halt: Halt) -> None:
        for process in halt.processes:
            process.resume()
        halt.seat.halted, halt.seat.since = False, time.monotonic()
        halt.round = max(seat.member.round for seat in self.swarm.seats)
        halt.mark = len(halt.seat.member.committed)
        halt.ends = time.monotonic()

    def _is_back(self, halt: Halt, round: int) -> bool:
        new = halt.seat.member.committed[halt.mark :]
        waited_s = time.monotonic() - halt.ends
        if not new and waited_s > BACK_WITHIN_S:
            self._came_late(halt, waited_s, f"was not back after {BACK_WITHIN_S:g} s")
            return True
        if new:
            passed = max(0, new[0].round - round - 1)  # rounds of the others that it missed after it went on
            self.returns[str(passed)] += 1
            if passed > BACK_WITHIN_ROUNDS:
                self._came_late(halt, waited_s, f"missed {passed} more rounds")
        return bool(new)

    def _came_late(self, halt: Halt, waited_s: float, what: str) -> None:
        went_on, peer_id = time.time() - waited_s, halt.seat.member.peer_id
        others = [seat.member for seat in self.swarm.seats if seat is not halt.seat]
        if any(refused_until(other.log_text(), peer_id) > went_on for other in others):
            self.refused_returns += 1
        else:
            self.late_returns.append(f"{halt.seat.name} {what}")

    def slow_peer(self, rounds: int, deadline: float) -> None:
        """One member makes a tenth of the steps; it weighs less, and the others do not stand still for it."""
        slow, fast = self.swarm.seats[-1], self.swarm.seats[0]
        slow.member.pace = SLOWER
        mark = len(fast.member.committed)
        while time.monotonic() < deadline and self.slow_rounds < rounds:
            self.turn()
            new = fast.member.committed[mark:]
            self.slow_rounds = sum(_weighs_less(record, slow, fast) for record in new)
        slow.member.pace = 1


def refused_until(log_text: str, peer_id: str) -> float:
    """When the last refusal of a peer ends, in unix seconds, as another peer's log says; 0: there was none."""
    said = [(at, int(seconds)) for at, refused, seconds in REFUSED.findall(log_text) if refused == peer_id]
    return max((datetime.strptime(at, LOG_TIME).timestamp() + seconds for at, seconds in said), default=0.0)


def _weighs_less(record: RoundRecord, slow: Seat, fast: Seat) -> bool:
    weights = dict(zip(record.members, record.weights, strict=True))
    ours, theirs = weights.get(slow.member.peer_id), weights.get(fast.member.peer_id)
    return ours is not None and theirs is not None and ours < theirs


def run(
    seed: int, budget: int, swarm: ChaosSwarm, *, shortest_s: float = 5.0, longest_s: float = 120.0, at_once: int = 2,
    slow_rounds: int = 5, minutes: float = 60.0, tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Stop `budget` times, as far as the minutes allow, then slow one down; -> counts.

    Args:
        swarm: open; its members have begun.
        shortest_s, longest_s: of a stop; in between, short ones are as likely as long ones of the same ratio.
        slow_rounds: rounds to make with a slow peer.
    """
    stopper = Stopper(swarm, random.Random(seed), shortest_s, longest_s)
    deadline, tell_at = time.monotonic() + 60 * minutes, 0.0
    while stopper.busy or (time.monotonic() < deadline and stopper.stops.total() < budget):
        more = time.monotonic() < deadline and stopper.stops.total() < budget
        if more and stopper.busy < at_once and sum(seat.live for seat in swarm.seats) > 2:
            stopper.stop_one()
        stopper.turn()
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + 10.0
            tell(stopper.counts())
    stopper.slow_peer(slow_rounds, time.monotonic() + OTHERS_WITHIN_S)
    swarm.run_until(swarm.settled, BACK_WITHIN_S)
    stopper.digests.compare_states(swarm.seats)
    return stopper.counts()
