"""G8: clocks that are wrong. A library that is preloaded into an agent shifts its wall clock (`shim`).

Newcomers whose clock is wrong by up to 2 s must join as others do; one whose clock is further off must hear that it
is the clock. A member whose clock jumps while it runs must cost the others no round, and be back once it is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peer.link.supervisor import AGENT_COMMAND, AgentProcess
from tests.network.chaos.shim import library
from tests.network.chaos.swarm import ChaosSwarm, Seat

TRIALS = tuple((kind, skew) for skew in (1, -1, 2, -2, 5, -5, 3600, -3600) for kind in ("start", "jump"))
HARMLESS_S = 2
MEMBERS = 3
ROUNDS = 3
OPEN_WITHIN_S, JOIN_WITHIN_S = 300.0, 120.0
JUMP_S = 60.0  # longer than a record of a peer lives
WORDS = "this machine's clock is"
Row = dict[str, Any]


class ClockSwarm(ChaosSwarm):
    """Members whose name ends in `_` and a number have a clock that is off by so many seconds."""

    def _agent(self, folder: Path) -> AgentProcess:
        _, _, offset = folder.name.partition("_")
        if not offset:
            return super()._agent(folder)
        self.set_clock(folder, int(offset))
        settings = (f"LD_PRELOAD={library()}", f"CHAOS_CLOCK_S={folder / 'clock'}")
        return AgentProcess(folder / "agent.log", ("env", *settings, *AGENT_COMMAND))

    @staticmethod
    def set_clock(folder: Path, seconds: int) -> None:
        """From now on."""
        (folder / "clock.tmp").write_text(str(seconds))
        (folder / "clock.tmp").replace(folder / "clock")


class Clocks:
    """The campaign over one swarm, which has begun."""

    def __init__(self, swarm: ClockSwarm) -> None:
        self.swarm, self.others = swarm, list(swarm.seats)
        self.ids = {seat.member.peer_id for seat in self.others}
        self.rows: list[Row] = []

    def newcomer(self, skew: int) -> None:
        """One that starts with a wrong clock."""
        marks = [len(seat.member.records) for seat in self.others]
        began = time.monotonic()
        (seat,) = self.swarm.open(f"new{len(self.rows)}_{skew}")
        wait_until = began + JOIN_WITHIN_S
        self.swarm.run_until(
            lambda: bool(seat.refusals) or self._rounds_with(seat, 0) >= ROUNDS or time.monotonic() > wait_until,
            JOIN_WITHIN_S + 60.0,
        )
        self.rows.append({
            "skew": skew, "kind": "start", "refusal": seat.refusals[0] if seat.refusals else None,
            "rounds": self._rounds_with(seat, 0), "seconds": round(time.monotonic() - began, 1),
            "others_aborted": self._aborted(marks),
        })  # fmt: skip
        self.swarm.retire(seat)
        self._all_together()

    def jump(self, skew: int) -> None:
        """One whose clock is right, then wrong for a minute, then right again."""
        (seat,) = self.swarm.open(f"jump{len(self.rows)}_0")
        self.swarm.run_until(lambda: self._rounds_with(seat, 0) >= 1, JOIN_WITHIN_S)
        marks, mark = [len(seat.member.records) for seat in self.others], len(seat.member.committed)
        self.swarm.set_clock(seat.member.folder, skew)
        until = time.monotonic() + JUMP_S
        self.swarm.run_until(lambda: time.monotonic() > until, JUMP_S + 60.0)
        others, meanwhile = self._aborted(marks), self._rounds_with(seat, mark)
        theirs = min(sum(r.status == "committed" for r in s.member.records[m:])
                     for s, m in zip(self.others, marks, strict=True))  # fmt: skip
        self.swarm.set_clock(seat.member.folder, 0)
        mark, began = len(seat.member.committed), time.monotonic()
        self.swarm.run_until(
            lambda: self._rounds_with(seat, mark) >= 1 or time.monotonic() - began > JOIN_WITHIN_S, JOIN_WITHIN_S + 60.0
        )
        self.rows.append({
            "skew": skew, "kind": "jump", "rounds": meanwhile, "others_rounds": theirs, "others_aborted": others,
            "back": self._rounds_with(seat, mark) >= 1, "back_after_s": round(time.monotonic() - began, 1),
        })  # fmt: skip
        self.swarm.retire(seat)
        self._all_together()

    def _rounds_with(self, seat: Seat, mark: int) -> int:
        """Rounds that it has committed with at least one of the others."""
        return sum(bool(self.ids & set(record.members)) for record in seat.member.committed[mark:])

    def _aborted(self, marks: Sequence[int]) -> int:
        found = [s.member.records[mark:] for s, mark in zip(self.others, marks, strict=True)]
        return sum(record.status == "aborted" for records in found for record in records)

    def _all_together(self) -> None:
        """Until the others have made a round without the one that has left."""
        marks = [len(seat.member.committed) for seat in self.others]
        self.swarm.run_until(
            lambda: all(any(set(r.members) == self.ids for r in seat.member.committed[mark:])
                        for seat, mark in zip(self.others, marks, strict=True)),
            JOIN_WITHIN_S,
        )  # fmt: skip


def count(rows: Sequence[Row]) -> Row:
    """What the trials come to."""
    small = [row for row in rows if abs(row["skew"]) <= HARMLESS_S]
    large = [row for row in rows if abs(row["skew"]) > HARMLESS_S]
    starts = [row for row in large if row["kind"] == "start"]
    jumps = [row for row in rows if row["kind"] == "jump"]
    return {
        "clocks": len(rows),
        "small_skews": len(small),
        "small_with_effect": sum(row["rounds"] == 0 or bool(row.get("refusal")) for row in small),
        "large_starts": len(starts),
        "not_refused_clearly": sum(WORDS not in (row["refusal"] or "") for row in starts),
        "jumps": len(jumps),
        "not_back": sum(not row["back"] for row in jumps),
        "others_aborted": sum(row["others_aborted"] for row in rows),
        "what_happened": [", ".join(f"{key} {value}" for key, value in row.items()) for row in rows],
    }


def run(
    folder: Path, *, trials: Sequence[tuple[str, int]] = TRIALS, minutes: float = 60.0,
    tell: Callable[[Row], None] = lambda _: None,
) -> Row:
    """Try each clock, as far as the minutes allow; -> counts.

    Args:
        trials: `start`, a newcomer, or `jump`, a member; and by how many seconds its clock is off.
    """
    swarm = ClockSwarm(folder, steps=20, pace_s=0.1)
    deadline = time.monotonic() + 60 * minutes
    try:
        swarm.open(*(f"peer{number}" for number in range(MEMBERS)))
        swarm.run_until(lambda: swarm.settled() and all(s.member.committed for s in swarm.seats), OPEN_WITHIN_S)
        clocks = Clocks(swarm)
        for kind, skew in trials:
            if time.monotonic() < deadline:
                (clocks.newcomer if kind == "start" else clocks.jump)(skew)
                tell(count(clocks.rows))
        return count(clocks.rows)
    finally:
        swarm.close()
