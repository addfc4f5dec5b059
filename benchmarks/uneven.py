"""What one peer that is ten times slower, or has a line of 5 Mbit/s, costs the others with paba: real peers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, documents, run_benchmark
from benchmarks.wan import DELAY_MS, LOOK_S, START_S, Case, Machines, manifest_of, swarm
from peer.errors import UserError
from peer.protocol.manifest import parse_manifest

NAME, MBIT, WEAK_MBIT, WARM_ROUNDS, GOAL = "uneven", 25.0, 5.0, 2, 95.0
STEPS, STEP_S = 40, 1.0  # so long that four peers leave half of two cores idle
WARM_S = START_S + 4 * WARM_ROUNDS * STEPS * STEP_S  # the unlike one misses rounds before it keeps up
ABOUT = "What a fourth peer, ten times slower or on 5 Mbit/s, costs three others with paba, and what of its work counts"
NOTES = """\
Real peers (`atoll join`) train the quickstart's model of 0.8M parameters with `paba` in fp32, each in a network
namespace behind a relay with {mbit:g} Mbit/s each way and {delay:g} ms one way, {steps} steps of at least {step:g} s to
a round. Looked at are the rounds of {seconds:g} s, after {warm} to measure each other. `others` is the rate of tokens
in committed rounds of each of the three peers that are alike, in the mean; `last` that of the fourth, and `counts` the
share of what it trained between these rounds. All processes share this machine's cores: see the load. A round has to
be long beside a step of the slowest peer and beside the exchange: a weight is at most that of twice a round's steps,
and what a peer trains beyond that in a round that takes longer is lost. A round may take five seconds and four times
what most of its members took, and longer by what the slowest line among them needs, as the joins say."""
CASES = {
    "three alike": Case(recipe="paba", mbit=MBIT, loss=0.0, peers=3, steps=STEPS, step_s=STEP_S),
    "a fourth, ten times slower": Case(recipe="paba", mbit=MBIT, loss=0.0, slow=True, steps=STEPS, step_s=STEP_S),
    "a fourth, on 5 Mbit/s": Case(recipe="paba", mbit=MBIT, loss=0.0, last_mbit=WEAK_MBIT, steps=STEPS, step_s=STEP_S),
}
HEADER = ("peers", "others, tokens/s", "of three alike", "last, tokens/s", "counts", "rounds", "members")


@dataclass(frozen=True, kw_only=True)
class UnevenRow:
    """One swarm.

    Attributes:
        committed, trained: tokens/s of each peer, the unlike one last: in committed rounds, and in steps meanwhile.
        rounds, members: that were looked at, and how many peers were in them on average.
    """

    what: str
    committed: tuple[float, ...]
    trained: tuple[float, ...]
    rounds: int
    members: float

    @property
    def others(self) -> float:
        """Tokens/s of a peer that is like two others."""
        return fmean(self.committed[:3])

    @property
    def counts(self) -> float | None:
        """Percent of what the fourth trained."""
        return 100.0 * self.committed[3] / self.trained[3] if len(self.committed) > 3 else None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Makes network namespaces (as root; with iproute2 and /dev/net/tun), puts a bootstrap and peers into them,\n"
        "and lets them train: three alike, then with a fourth that is slow, then with one on a slow line.",
    )
    parser.add_argument("--seconds", type=int, default=120, metavar="N", help="of each measurement (default: 120)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Everything, one swarm after the other."""
    check_count("--seconds", arguments.seconds, 30)
    rows: list[UnevenRow] = []
    for what, case in CASES.items():
        with swarm(case) as machines:
            machines.await_rounds(case.peers, WARM_ROUNDS, WARM_S)
            first = time.time()
            while time.time() < first + arguments.seconds:
                time.sleep(LOOK_S)
            rows.append(row_of(what, case, machines, first))
        say(" | ".join(f"{name} {value}" for name, value in zip(HEADER, line(rows[-1], rows), strict=True)))
    notes = NOTES.format(
        mbit=MBIT, delay=DELAY_MS, steps=STEPS, step=STEP_S, seconds=arguments.seconds, warm=WARM_ROUNDS
    )
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=notes,
        table=(HEADER, *(line(row, rows) for row in rows)), options=("--seconds", str(arguments.seconds)),
        more={"rows": documents(rows)},
    )  # fmt: skip


def row_of(what: str, case: Case, machines: Machines, first: float) -> UnevenRow:
    """Of the rounds that the first peer committed since then.

    Raises:
        UserError: fewer than two.
    """
    rounds = [event for event in machines.rounds(0) if event["time"] >= first]
    if len(rounds) < 2:
        raise UserError(f"{what}: {len(rounds)} rounds within the time; must be at least 2", "give more --seconds")
    began, ended = rounds[0]["time"], rounds[-1]["time"]
    tokens = parse_manifest(manifest_of(case).encode(), NAME).tokens_per_step
    committed, trained = [], []
    for index in range(case.peers):
        peer_id = machines.events(index, "start")[0]["peer_id"]
        weights = [dict(zip(event["members"], event["weights"], strict=True)).get(peer_id, 0) for event in rounds[1:]]
        steps = [event for event in machines.events(index, "step") if began <= event["time"] < ended]
        committed.append(sum(weights) / (ended - began))
        trained.append(len(steps) * tokens / (ended - began))
    members = fmean(len(event["members"]) for event in rounds)
    return UnevenRow(
        what=what, committed=tuple(committed), trained=tuple(trained), rounds=len(rounds) - 1, members=members
    )


def figures(rows: Sequence[UnevenRow]) -> tuple[Figure, ...]:
    """What the fourth peer leaves of the others' rate, and how much of its own work counts."""
    found = []
    for row in rows[1:]:
        rate = 100.0 * row.others / rows[0].others
        found.append(Figure(name=f"{row.what}: rate of the others", value=rate, unit="%", limit=GOAL, at_most=False))
        if row.counts is not None:
            found.append(Figure(name=f"{row.what}: its work that counts", value=row.counts, unit="%", limit=GOAL,
                                at_most=False))  # fmt: skip
    return tuple(found)


def line(row: UnevenRow, rows: Sequence[UnevenRow]) -> tuple[str, ...]:
    """A row as text."""
    last = ("-", "-") if row.counts is None else (f"{row.committed[3]:.0f}", f"{row.counts:.0f}%")
    share = f"{100.0 * row.others / rows[0].others:.1f}%"
    return (row.what, f"{row.others:.0f}", share, *last, str(row.rounds), f"{row.members:.1f}")


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
