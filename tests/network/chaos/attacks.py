"""G9, over real libp2p streams: a hostile peer tries every script on two honest ones, which must go on together."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.network.chaos.insiders import ATTACKS
from tests.network.chaos.observe import Digests, Process, tracebacks
from tests.network.chaos.swarm import ChaosSwarm, Seat

ROUNDS_AFTER = 2
GOES_ON_WITHIN_S = 90.0  # an exchange's deadline of 20 s, the pauses after it, and a busy machine
START_WITHIN_S = 240.0
ANSWER_WITHIN_S = 240.0


class AttackerProcess:
    """The hostile peer as a child."""

    def __init__(self, folder: Path, address: str, run_id: str, honest: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "attacker.log").open("ab")
        self._buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.network.chaos.attacker", str(os.getpid()), str(folder), address, run_id,
             *honest],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def ask(self, **request: Any) -> None:
        """Begin an attack."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """What it has said, if it has."""
        assert self.process.stdout is not None
        assert self.process.poll() is None, "the attacker has ended; see attacker.log"
        self._buffer += self.process.stdout.read() or b""
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            return None
        self._buffer = rest
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class Range:
    """Two honest peers and what becomes of them."""

    def __init__(self, swarm: ChaosSwarm, honest: Sequence[Seat]) -> None:
        self.swarm, self.honest = swarm, list(honest)
        self.made: list[str] = []
        self.not_made: list[str] = []
        self.lost: list[str] = []
        self.dropped: list[str] = []
        self.digests = Digests()
        self._agents: list[Process] = [seat.processes[0] for seat in self.honest]
        self._memory = [agent.rss_bytes for agent in self._agents]
        self.growth_mb = 0.0

    def attack(self, attacker: AttackerProcess, name: str, seed: int) -> None:
        """One script, then two more rounds of the honest."""
        before = [len(seat.member.log_text()) for seat in self.honest]
        ids = [seat.member.peer_id for seat in self.honest]
        attacker.ask(attack=name, honest=ids, seed=seed)
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            answer = attacker.answer()
            if answer is not None:
                answers.append(answer)
            return bool(answers)

        self.swarm.run_until(answered, ANSWER_WITHIN_S)
        said = f"{name}: {answers[0]['problem']}"
        if not answers[0]["made"]:
            self.not_made.append(said)
        else:
            self.made.append(name)
            self.lost += [said] if answers[0]["problem"] else []
        self._go_on(name)
        self._look_at_logs(name, before)

    def _go_on(self, name: str) -> None:
        """The honest must commit with each other, each in the process that it was in before."""
        ids = {seat.member.peer_id for seat in self.honest}
        marks = [len(seat.member.committed) for seat in self.honest]

        def together(seat: Seat, mark: int) -> bool:
            return sum(ids <= set(r.members) for r in seat.member.committed[mark:]) >= ROUNDS_AFTER

        deadline = time.monotonic() + GOES_ON_WITHIN_S
        while not all(together(seat, mark) for seat, mark in zip(self.honest, marks, strict=True)):
            if time.monotonic() > deadline:
                self.lost.append(f"{name}: no round of the honest within {GOES_ON_WITHIN_S:g} s")
                break
            self.swarm.tick()
        for place, (seat, agent) in enumerate(zip(self.honest, self._agents, strict=True)):
            if not agent.alive:
                self.lost.append(f"{name}: the agent of {seat.name} ended")
                self.swarm.run_until(lambda seat=seat: bool(seat.processes) and seat.live)  # type: ignore[misc]
                self._agents[place] = seat.processes[0]
            self.growth_mb = max(self.growth_mb, (agent.rss_bytes - self._memory[place]) / 1e6)
            self.digests.add(seat.name, seat.member.records)
            for record in seat.member.committed[marks[place] :]:
                if not ids <= set(record.members):
                    self.dropped.append(f"{name}: round {record.round} without an honest peer")

    def _look_at_logs(self, name: str, before: list[int]) -> None:
        ids = [seat.member.peer_id for seat in self.honest]
        for seat, length in zip(self.honest, before, strict=True):
            said = seat.member.log_text()[length:]
            self.dropped += [f"{name}: {one} is no donor" for one in ids if f"{one} cannot be a donor" in said]
            for trouble in tracebacks(said):
                self.lost.append(f"{name}: {seat.name} logged a traceback: {trouble.splitlines()[-1]}")
                print(f"{name}: {seat.name} logged\n{trouble}")  # whole, where an assertion would shorten it

    def counts(self) -> dict[str, Any]:
        """So far."""
        return {
            "attacks": len(self.made),
            "attacks_lost": len(self.lost),
            "what_was_lost": self.lost,
            "attacks_not_brought_about": len(self.not_made),
            "what_was_not_made": self.not_made,
            "honest_wrongly_dropped": len(self.dropped),
            "who_was_dropped": self.dropped,
            "largest_memory_growth_mb": round(self.growth_mb, 1),
            "digests_compared": self.digests.compared,
            "digest_mismatches": len(self.digests.mismatches),
        }


def run(
    seed: int, names: Sequence[str], swarm: ChaosSwarm, *, minutes: float = 60.0,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Try these attacks on the first two members of the swarm, as far as the minutes allow; -> counts.

    The other members are ended first.
    """
    rng = random.Random(seed)
    honest = swarm.seats[:2]
    for seat in swarm.seats[2:]:  # with two, a round without one of them is a round of the attacker
        swarm.retire(seat)
    swarm.run_until(lambda: all(_in_a_pair(seat) for seat in honest), START_WITHIN_S)
    bootstrap = swarm.bootstraps[0]
    ids = [seat.member.peer_id for seat in honest]
    attacker = AttackerProcess(swarm.folder / "attacker", bootstrap.address, bootstrap.run_id, ids)
    field = Range(swarm, honest)
    deadline = time.monotonic() + 60 * minutes
    try:
        swarm.run_until(lambda: attacker.answer() is not None, START_WITHIN_S)
        for name in names:
            if time.monotonic() > deadline:
                break
            field.attack(attacker, name, rng.randrange(2**32))
            tell(field.counts())
    finally:
        attacker.close()
    return field.counts()


def _in_a_pair(seat: Seat) -> bool:
    return seat.live and bool(seat.member.committed) and len(seat.member.committed[-1].members) == 2


def every() -> list[str]:
    """All scripts, in a fixed order."""
    return list(ATTACKS)
