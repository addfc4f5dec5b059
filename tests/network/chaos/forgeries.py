"""G15: forged lineages. A stranger, or a former member, shows chains that verify; no honest peer may stand on one.

Three honest members, a newcomer and the bootstrap, each on a machine of its own. In turn: the chain is forged from
genesis; from a true ancestor, with the key of a former member; behind true links that a peer which slept has missed,
and that a newcomer has never seen; while one member is cut off; while the bootstrap is away. Every third chain claims
the run's end. Counted: trials in which a peer, or the bootstrap, stood on a forged link at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peer.link.messages import Anchor
from peer.system.death_signal import die_with_parent
from tests.chain_files import read_chain
from tests.network.chaos import forger
from tests.network.chaos.forger import Forgery
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.observe import process
from tests.network.chaos.wide import LISTEN, WideSwarm
from tests.network.forked import ForkedProcess
from tests.network.members import Member

TRIALS = 50
VARIANTS = ("genesis", "former member", "own donor", "split", "bootstrap away")
HONEST = ("a", "b", "c")
FORMER, NEWCOMER, STRANGER = "former", "newcomer", "stranger"
FORMER_ROUNDS = 12  # more than probation takes
TOTAL = 2000
WATCH_S = 6.0
MISSED_ROUNDS = 2
PHASE_TIMEOUT_S = 180.0
Row = dict[str, Any]


class Siege:
    """The honest, and what becomes of them."""

    def __init__(self, folder: Path, internet: Internet, steps: int) -> None:
        self.internet = internet
        for name in ("bootstrap", *HONEST, FORMER, NEWCOMER, STRANGER):
            internet.host(name)
        self.swarm = WideSwarm(folder, internet, steps=steps, wait=2.0, total=TOTAL)
        self.key = folder / FORMER / "identity.key"
        self.stood: set[str] = set()
        self._pending: list[Member] = []

    def open(self) -> None:
        """Three members and one that leaves after it has passed probation."""
        swarm = self.swarm
        swarm.bootstrap()
        former = swarm.add(*HONEST, FORMER)[-1]
        swarm.drive(lambda: len(former.committed) >= FORMER_ROUNDS, PHASE_TIMEOUT_S)
        former.agent.close()
        swarm.members.remove(former)

    def drive(self, until: Callable[[], bool], timeout_s: float = PHASE_TIMEOUT_S) -> None:
        """See `TestSwarm.drive`; who starts meanwhile is brought up, and where members stand is noted."""

        def looked() -> bool:
            for member in tuple(self._pending):
                message = member.agent.receive()
                if isinstance(message, Anchor):
                    assert member.sync is not None
                    member.sync.begin(message)
                    self._pending.remove(member)
                    self.swarm.members.append(member)
            self.stood |= {str(member.lineage_id) for member in self.swarm.members}
            return until()

        self.swarm.drive(looked, timeout_s)

    def rounds(self, count: int) -> None:
        """So many more rounds of every member that is awake."""
        awake = [member for member in self.swarm.members if not member.frozen]
        goal = {member.name: len(member.committed) + count for member in awake}
        self.drive(lambda: all(len(member.committed) >= goal[member.name] for member in awake))

    def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.drive(lambda: time.monotonic() >= until)

    @property
    def honest(self) -> list[Member]:
        return [member for member in self.swarm.members if member.name in HONEST]

    def newcomer(self) -> Member:
        """One that has never been here."""
        shutil.rmtree(self.swarm.folder / NEWCOMER, ignore_errors=True)
        swarm = self.swarm
        member = swarm._launch(NEWCOMER, swarm.bootstraps[0].address, len(swarm.members))
        swarm._connect(member, swarm.bootstraps[0].genesis(), swarm.bootstraps[0].fragments())
        self._pending.append(member)
        return member

    def retire(self, member: Member) -> None:
        member.agent.close()
        self.swarm.members.remove(member)

    @contextlib.contextmanager
    def asleep(self, member: Member) -> Iterator[None]:
        """The member's agent is suspended."""
        assert member.agent.pid is not None
        found = process(member.agent.pid)
        assert found is not None
        found.send(signal.SIGSTOP)
        member.frozen = True
        try:
            yield
        finally:
            found.send(signal.SIGCONT)
            member.frozen = False

    @contextlib.contextmanager
    def forging(self, forgery: Forgery, folder: Path) -> Iterator[Path]:
        """The stranger is at work; -> where it notes what it forges."""
        folder.mkdir(parents=True)
        addresses = [member.maddrs[0] for member in self.honest]
        ids = [member.peer_id for member in self.honest]
        arguments = [str(folder), self.swarm.bootstraps[0].run_id, json.dumps(addresses), json.dumps(ids),
                     forgery.to_json(), LISTEN]  # fmt: skip
        parent = os.getpid()

        def main() -> None:
            die_with_parent(parent)
            forger.main()

        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        with self.internet.hosts[STRANGER].entered():
            child = ForkedProcess(main, arguments, folder / "forger.log", stdout=writing)
        os.close(writing)

        def begun() -> bool:
            assert child.poll() is None, (folder / "forger.log").read_text()
            with contextlib.suppress(BlockingIOError):
                return bool(os.read(reading, 1000))
            return False

        try:
            self.drive(begun)
            yield folder / "forged"
        finally:
            os.close(reading)
            child.kill()
            child.wait()

    def bootstrap_away(self) -> None:
        self.swarm.bootstraps[0].kill()

    def bootstrap_back(self) -> None:
        """With its folder, at its old address."""
        gone = self.swarm.bootstraps.pop(0)
        gone.output.close()
        self.swarm.bootstrap(port=gone.port)

    def signed(self) -> set[str]:
        """What the bootstrap has followed, of which it signs the tip."""
        links = (self.swarm.bootstraps[0].folder / "history").glob("*/chain.jsonl")
        return {one.link.id for path in links for one in read_chain(path)}


def forgery_of(variant: str, number: int, key: Path, rng: random.Random) -> Forgery:
    """What is forged in one trial."""
    rounds = 0 if number % 3 == 2 else rng.choice((20, 300))
    base = {"genesis": "genesis", "former member": "past", "own donor": "tip"}.get(variant)
    base = base or rng.choice(("genesis", "past", "tip"))
    former = base == "past" or (base == "tip" and rng.random() < 0.5)
    return Forgery(
        base=base, back=rng.randrange(12), rounds=min(rounds, 40) if rounds and base == "tip" else rounds,
        former=str(key) if former else "", hidden=base == "tip" and rng.random() < 0.5, seed=rng.randrange(10**6),
    )  # fmt: skip


def trial(siege: Siege, variant: str, number: int, rng: random.Random, watch_s: float) -> Row:
    """One siege; raises AssertionError when a phase takes PHASE_TIMEOUT_S."""
    siege.rounds(1)
    siege.stood.clear()
    before, began = min(member.round for member in siege.honest), time.monotonic()
    forgery = forgery_of(variant, number, siege.key, rng)
    late = rng.choice(siege.honest)
    others = [member for member in siege.honest if member is not late]
    folder = siege.swarm.folder / f"forger{number}-{time.monotonic_ns()}"
    guests: list[Member] = []
    with contextlib.ExitStack() as stranger:
        with contextlib.ExitStack() as trouble:
            if variant == "split":
                names = [tuple(member.name for member in others), (late.name,)]
                names[rng.randrange(2)] += ("bootstrap",)
                siege.internet.split(names[0], names[1])
                trouble.callback(siege.internet.heal)
            elif variant == "bootstrap away":
                siege.bootstrap_away()
                trouble.callback(siege.bootstrap_back)
            forged = stranger.enter_context(siege.forging(forgery, folder))
            if variant == "own donor":
                with siege.asleep(late):
                    siege.rounds(MISSED_ROUNDS)
                guests.append(siege.newcomer())
            else:
                siege.watch(watch_s)
        siege.watch(watch_s)
    siege.drive(lambda: not siege._pending)
    siege.swarm.drive_together(siege.swarm.members, timeout_s=PHASE_TIMEOUT_S)
    siege.rounds(1)
    made = set(forged.read_text().split())
    row = {
        "variant": variant, "base": forgery.base, "former": bool(forgery.former), "hidden": forgery.hidden,
        "end": not forgery.rounds, "forged": len(made), "taken": len(made & siege.stood),
        "signed": len(made & siege.signed()), "rounds": min(m.round for m in siege.honest) - before,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    for guest in guests:
        siege.retire(guest)
    return row


def run(
    folder: Path, *, trials: int = TRIALS, seed: int = 0, steps: int = 60, watch_s: float = WATCH_S,
    variants: Sequence[str] = VARIANTS, minutes: float = float("inf"), tell: Callable[[Row], None] = lambda _: None,
) -> Row:
    """As many sieges as there is time for, one variant after the other; -> `count` of all."""
    rows: list[Row] = []
    until = time.monotonic() + 60 * minutes
    with Internet() as internet:
        siege = Siege(folder, internet, steps)
        try:
            siege.open()
            while len(rows) < trials and time.monotonic() < until:
                rng = random.Random(f"{seed} {len(rows)}")
                rows.append(trial(siege, variants[len(rows) % len(variants)], len(rows), rng, watch_s))
                tell(count(rows))
        finally:
            siege.swarm.close()
    return count(rows)


def count(rows: Sequence[Row]) -> Row:
    """What the trials come to."""
    idle = {number: row for number, row in enumerate(rows) if row["rounds"] < 2}
    return {
        "trials": len(rows),
        "trials_by_variant": {each: sum(row["variant"] == each for row in rows) for each in VARIANTS},
        "links_forged": sum(row["forged"] for row in rows),
        "claims_of_the_end": sum(row["end"] for row in rows),
        "taken_over": sum(row["taken"] > 0 for row in rows),
        "signed_by_the_bootstrap": sum(row["signed"] > 0 for row in rows),
        "without_a_round": len(idle),
        "which_without": [f"siege {number} ({row['variant']}): {row['seconds']} s" for number, row in idle.items()],
        "longest_trial_s": max((row["seconds"] for row in rows), default=0.0),
    }
