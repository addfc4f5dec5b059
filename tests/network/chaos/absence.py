"""G7: a bootstrap that is away, once for ten minutes and twenty times for seconds.

Members must lose no round for it. A newcomer that knows no other address is started while the bootstrap is away, and
must have joined a minute after its return, however its first attempts ended.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.network.chaos.observe import Digests, family
from tests.network.chaos.swarm import ChaosSwarm

MEMBERS = 4
LONG_S, RESTARTS = 600.0, 20
SHORTEST_S, LONGEST_S = 1.0, 30.0
OPEN_WITHIN_S, JOINED_WITHIN_S, GIVE_UP_S = 300.0, 60.0, 240.0
Row = dict[str, Any]


class Absences:
    """The campaign over one swarm, whose members have begun."""

    def __init__(self, swarm: ChaosSwarm, rng: random.Random) -> None:
        self.swarm, self._rng, self.members = swarm, rng, list(swarm.seats)
        self.rows: list[Row] = []
        self.digests = Digests()

    def one(self, seconds: float) -> None:
        """The bootstrap is killed or ended, and starts again as it was after so many seconds."""
        self._together()
        marks = [len(seat.member.records) for seat in self.members]
        bootstrap = self.swarm.bootstraps[0]
        everything = family(bootstrap.process.pid)
        ended = self._rng.choice(("SIGKILL", "SIGTERM"))
        for process in everything if ended == "SIGKILL" else everything[:1]:
            process.send(signal.Signals[ended])
        away = time.monotonic()
        joins_at = away + self._rng.uniform(0.0, seconds)
        self.swarm.run_until(lambda: time.monotonic() >= joins_at, seconds + 60.0)
        (newcomer,) = self.swarm.open(f"newcomer{len(self.rows)}")
        self.swarm.run_until(lambda: time.monotonic() >= away + seconds, seconds + 60.0)
        bootstrap.close()
        self.swarm.bootstraps[0] = self.swarm._start_bootstrap(bootstrap.folder, (), bootstrap.port)
        assert self.swarm.bootstraps[0].address == bootstrap.address
        back = time.monotonic()
        self.swarm.run_until(lambda: newcomer.begun, GIVE_UP_S)
        joined_s = time.monotonic() - back
        told = [seat.member.records[mark:] for seat, mark in zip(self.members, marks, strict=True)]
        records = [record for own in told for record in own]
        self.rows.append({
            "away_s": round(back - away, 1), "ended": ended, "joined_after_s": round(joined_s, 1),
            "failed_starts": newcomer.failed_starts,
            "committed": sum(record.status == "committed" for record in records),
            "lost": sum(record.status == "aborted" for record in records),
            "why": [f"{r.phase} {r.reason}" for r in records if r.status == "aborted"],
            "fewest": min(sum(record.status == "committed" for record in own) for own in told),
        })  # fmt: skip
        for seat in self.members:
            self.digests.add(seat.name, seat.member.records)
        self.swarm.retire(newcomer)

    def _together(self) -> None:
        """Until the members have made a round without the newcomer that has left."""
        ids = {seat.member.peer_id for seat in self.members}
        marks = [len(seat.member.committed) for seat in self.members]
        self.swarm.run_until(
            lambda: all(any(set(r.members) == ids for r in seat.member.committed[mark:])
                        for seat, mark in zip(self.members, marks, strict=True)),
            GIVE_UP_S,
        )  # fmt: skip

    def counts(self) -> Row:
        """So far."""
        rows: Sequence[Row] = self.rows
        return {
            "absences": len(rows),
            "longest_away_s": max((row["away_s"] for row in rows), default=0.0),
            "seconds_away": round(sum(row["away_s"] for row in rows), 1),
            "rounds_committed": sum(row["committed"] for row in rows),
            "rounds_lost": sum(row["lost"] for row in rows),
            "why_lost": [why for row in rows for why in row["why"]],
            "late_joins": sum(row["joined_after_s"] > JOINED_WITHIN_S for row in rows),
            "longest_until_joined_s": max((row["joined_after_s"] for row in rows), default=0.0),
            "failed_starts": sum(row["failed_starts"] for row in rows),
            "digests_compared": self.digests.compared,
            "digest_mismatches": len(self.digests.mismatches),
            "each_absence": [f"away {row['away_s']} s after {row['ended']}, {row['fewest']} rounds or more meanwhile, "
                             f"joined after {row['joined_after_s']} s" for row in rows],
        }  # fmt: skip


def run(
    seed: int, folder: Path, *, absences: int = RESTARTS, long_s: float | None = LONG_S, longest_s: float = LONGEST_S,
    minutes: float = 60.0, tell: Callable[[Row], None] = lambda _: None,
) -> Row:
    """So many short absences, after the long one; as far as the minutes allow; -> counts.

    Args:
        long_s: of the first; None: there is none.
        longest_s: of the short ones.
    """
    rng = random.Random(seed)
    swarm = ChaosSwarm(folder, steps=20, pace_s=0.1)
    deadline = time.monotonic() + 60 * minutes
    try:
        swarm.open(*(f"peer{number}" for number in range(MEMBERS)))
        swarm.run_until(lambda: swarm.settled() and all(s.member.committed for s in swarm.seats), OPEN_WITHIN_S)
        trials = Absences(swarm, rng)
        lengths = [rng.uniform(SHORTEST_S, longest_s) for _ in range(absences)]
        lengths[:0] = [long_s] if long_s is not None else []
        for seconds in lengths:
            if time.monotonic() < deadline:
                trials.one(seconds)
                tell(trials.counts())
        return trials.counts()
    finally:
        swarm.close()
