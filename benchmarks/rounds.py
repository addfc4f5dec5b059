"""Seconds of a round among three peers whose group stands, phase by phase, beside gloo's all-reduce."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, quantile, run_benchmark
from benchmarks.gloo import all_reduce_seconds
from benchmarks.vectors import PACE_S, SHAPES, Shape, vector_swarm
from peer.outer.record import RoundRecord

NAME = "rounds"
ABOUT = "Seconds of a round among three peers on one machine, against gloo's fp32 all-reduce of the same vector"
PEERS = ("first", "second", "third")
SIZES = ("0.8M", "10M")
PHASES = ("match", "exchange", "commit", "install")
WARM_UP = 3
TIMEOUT_S = 400.0
DEMO_LIMIT_S = 0.5


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Three real agents average vectors of the demo's size and of 10M parameters, int8. A round counts from the\n"
        "moment the last member is ready until the last one has installed the update; phase by phase, matching is the\n"
        "last member's, every other phase the slowest member's. In the same run, three processes all-reduce the same\n"
        "fp32 vector with gloo; nothing there is compressed, signed, checked, voted on or recorded on disk.",
    )
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="rounds for each size (default: 30)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Measure each size."""
    check_count("--rounds", arguments.rounds, 2)
    samples: dict[str, Any] = {}
    found: list[Figure] = []
    for size in SIZES:
        say(f"{size} parameters: starting a bootstrap and three agents")
        rounds = measure_rounds(SHAPES[size], arguments.seed, arguments.rounds)
        say(f"{size}: {len(rounds)} rounds, median {median([one['total'] for one in rounds]):.3f} s; now gloo")
        gloo = all_reduce_seconds(SHAPES[size].numel, len(PEERS), arguments.rounds)
        samples[size] = {"parameters": SHAPES[size].numel, "rounds": rounds, "gloo": gloo}
        found += figures(size, rounds, gloo)
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(found), samples=samples)


def measure_rounds(shape: Shape, seed: int, rounds: int) -> list[dict[str, float]]:
    """Seconds by phase of `rounds` rounds that all three committed together, after a few to warm up."""
    with vector_swarm(shape, seed, PEERS) as swarm:

        def found() -> list[dict[str, float]]:
            return together([member.committed for member in swarm.members])

        swarm.drive(lambda: len(found()) >= WARM_UP + rounds, TIMEOUT_S, PACE_S)
        return found()[WARM_UP:]


def together(records: Sequence[Sequence[RoundRecord]]) -> list[dict[str, float]]:
    """For every round that all members committed in one group: seconds by phase, and from the moment the last of them
    was ready until the last one had installed the update.

    Args:
        records: the committed records of each member, all of one machine's clock.
    """
    by_round = [{record.round: record for record in own} for own in records]
    common = sorted(set.intersection(*(set(own) for own in by_round)))
    rounds = []
    for number in common:
        group = [own[number] for own in by_round]
        if any(len(record.members) != len(records) for record in group):
            continue
        phases = {phase: max(record.seconds[phase] for record in group) for phase in PHASES}
        phases["match"] = min(record.seconds["match"] for record in group)
        rounds.append({"round": float(number), **phases, "total": _seconds_together(group)})
    return rounds


def _seconds_together(group: Sequence[RoundRecord]) -> float:
    ended = [record.ended_at for record in group if record.ended_at is not None]
    ready = [end - record.seconds["total"] for end, record in zip(ended, group, strict=True)]
    return max(ended) - max(ready)


def figures(size: str, rounds: Sequence[dict[str, float]], gloo: Sequence[float]) -> list[Figure]:
    """Median and 90th percentile by phase, and the ratio to gloo."""
    limit = DEMO_LIMIT_S if size == SIZES[0] else None
    totals = [one["total"] for one in rounds]
    found = [
        Figure(name=f"{size}: round, median", value=median(totals), unit="s", limit=limit),
        Figure(name=f"{size}: round, p90", value=quantile(totals, 0.9), unit="s"),
    ]
    for phase in PHASES:
        seconds = [one[phase] for one in rounds]
        found.append(Figure(name=f"{size}: {phase}, median", value=median(seconds), unit="s"))
        found.append(Figure(name=f"{size}: {phase}, p90", value=quantile(seconds, 0.9), unit="s"))
    found.append(Figure(name=f"{size}: gloo all-reduce, median", value=median(gloo), unit="s"))
    found.append(Figure(name=f"{size}: round / gloo all-reduce", value=median(totals) / median(gloo), unit="x"))
    return found


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
