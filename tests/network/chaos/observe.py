"""What is true of a swarm from outside: which processes live, who made no progress, whose states differ."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.outer.record import RoundRecord
from tests.network.processes import descendants

if TYPE_CHECKING:
    from tests.network.chaos.swarm import Seat

ORPHANED_AFTER_S = 5.0
_DATED = re.compile(r"^\d{4}-\d\d-\d\d ", re.MULTILINE)


def tracebacks(log: str) -> list[str]:
    """The entries of a log that hold a traceback, each whole."""
    starts = [0, *(match.start() for match in _DATED.finditer(log)), len(log)]
    entries = (log[start:stop].rstrip() for start, stop in pairwise(starts))
    return [entry for entry in entries if "Traceback" in entry]


@dataclass(frozen=True)
class Process:
    """One process; its start time tells it from a later one of the same id."""

    pid: int
    started: int

    @property
    def state(self) -> str | None:
        """The kernel's letter for what it does, None once it is gone."""
        return _stat(self.pid)[0] if _started(self.pid) == self.started else None

    @property
    def alive(self) -> bool:
        return self.state not in (None, "Z", "X")

    @property
    def stopped(self) -> bool:
        return self.state == "T"

    def send(self, number: signal.Signals) -> None:
        """A signal, unless the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    @property
    def starved_s(self) -> float:
        """Seconds that its main thread has been ready to run and had no processor, 0 once it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            return 0.0

    @property
    def rss_bytes(self) -> int:
        """Resident memory, 0 once it is gone."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


def _started(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def process(pid: int) -> Process | None:
    """The process that has this id now."""
    started = _started(pid)
    return Process(pid, started) if started is not None else None


def family(pid: int) -> list[Process]:
    """A process and everything below it, as they are now."""
    found = [process(each) for each in (pid, *descendants(pid))]
    return [each for each in found if each is not None]


@dataclass
class Orphans:
    """Watches what has lost its owner: it must be gone `within_s` later."""

    within_s: float = ORPHANED_AFTER_S
    found: int = 0
    checked: int = 0
    _watched: list[tuple[float, Process]] = field(default_factory=list)

    def watch(self, processes: Iterable[Process]) -> None:
        """From now on."""
        due = time.monotonic() + self.within_s
        self._watched += [(due, each) for each in processes]

    def check(self) -> None:
        """Count those whose time is over, and end those that still live."""
        now = time.monotonic()
        for due, each in self._watched:
            if now >= due:
                self.checked += 1
                if each.alive:
                    self.found += 1
                    each.send(signal.SIGKILL)
        self._watched = [(due, each) for due, each in self._watched if now < due]

    @property
    def waiting(self) -> bool:
        return bool(self._watched)

    def counts(self) -> dict[str, Any]:
        """What a campaign reports of them."""
        return {"orphans": self.found, "processes_checked": self.checked}


@dataclass
class Hangs:
    """A live peer that ends no round, committed or not, within the limit hangs; so does a swarm that commits none.

    Time that a process was ready and the machine had no processor for it does not count: that is no fault of ours.

    Args:
        limit_s: more than a round can take: its window, its deadline and the pause after it.
    """

    limit_s: float
    found: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _commits: tuple[int, float] = (0, 0.0)
    _starved: dict[str, tuple[float, Process | None, float]] = field(default_factory=dict)

    def _waited_s(self, seat: Seat, now: float) -> float:
        """Since its last record, less what it was starved since."""
        current = process(seat.member.agent.pid or 0)
        since, before, starved_s = self._starved.get(seat.name, (-1.0, None, 0.0))
        if since != seat.since or before != current:
            starved_s = current.starved_s if current is not None and since != seat.since else 0.0
            self._starved[seat.name] = (seat.since, current, starved_s)
        return now - seat.since - ((current.starved_s if current is not None else 0.0) - starved_s)

    def check(self, seats: list[Seat], commits: int) -> list[Seat]:
        """-> those that hang; each counts once."""
        now = time.monotonic()
        waited = {seat.name: self._waited_s(seat, now) for seat in seats if not seat.halted}
        self.longest_s = max([self.longest_s, *waited.values()])
        hanging = [seat for seat in seats if waited.get(seat.name, 0.0) > self.limit_s]
        self.found += [f"{seat.name}: {'no round' if seat.begun else 'not started'}" for seat in hanging]
        for seat in hanging:
            seat.since = now
        if commits != self._commits[0] or sum(seat.live for seat in seats) < 2 or self._commits[1] == 0.0:
            self._commits = (commits, now)
        elif now - self._commits[1] > self.limit_s:
            self.found.append("no round of the swarm was committed")
            self._commits = (commits, now)
        return hanging

    def counts(self) -> dict[str, Any]:
        """What a campaign reports of them."""
        return {
            "hangs": len(self.found),
            "what_hung": self.found,
            "longest_without_a_record_s": round(self.longest_s, 1),
        }


@dataclass
class Digests:
    """Compares states: of the members of a round by their records, of peers at one lineage id by the bytes."""

    compared: int = 0
    mismatches: list[str] = field(default_factory=list)
    rounds: set[str] = field(default_factory=set)
    _by_group: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    _seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def counts(self) -> dict[str, Any]:
        """What a campaign reports of them."""
        return {
            "digests_compared": self.compared,
            "digest_mismatches": len(self.mismatches),
            "what_differed": self.mismatches,
        }

    def add(self, peer_id: str, records: list[RoundRecord]) -> None:
        """Take in what a member has told since the last time."""
        new, self._seen[peer_id] = records[self._seen[peer_id] :], len(records)
        for record in new:
            if record.status == "committed" and record.group_id and record.state_digest:
                self.rounds.add(record.lineage_id)
                outcome = f"{record.lineage_id} {record.state_digest}"
                others = self._by_group[f"{record.round} {record.group_id}"]
                self.compared += bool(others)
                others[outcome].add(peer_id)
                if len(others) > 1 and len(others[outcome]) == 1:
                    self.mismatches.append(f"round {record.round}, group {record.group_id[:12]}: {peer_id}")

    def compare_states(self, seats: list[Seat]) -> None:
        """The bytes of all peers at the same lineage id, but for those that move meanwhile."""
        states: dict[str, dict[str, str]] = defaultdict(dict)
        for seat in seats:
            sync = seat.member.sync
            head = sync.memory.head if sync is not None and seat.live else None
            if sync is None or head is None:
                continue
            digest = hashlib.sha256(sync.memory.anchor.numpy().tobytes())
            for buffer in sync.memory.buffers:
                digest.update(buffer.numpy().tobytes())
            if sync.memory.head == head:
                states[head.lineage_id][seat.name] = digest.hexdigest()
        for lineage_id, names in states.items():
            self.compared += len(names) - 1
            if len(set(names.values())) > 1:
                self.mismatches.append(f"lineage {lineage_id[:12]}: {names}")
