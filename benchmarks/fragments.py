"""Memory of an agent by the number of fragments that its run streams."""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, run_benchmark
from benchmarks.memory import measure_size
from benchmarks.vectors import SHAPES

NAME = "fragments"
ABOUT = "Memory of an agent and its libp2p daemon (PSS), 50M parameters averaged in int8, whole and in fragments"
SIZE, FRAGMENTS, STEPS = "50M", (1, 2, 5, 10), 10


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(NAME, "As benchmarks.memory, of one model that is whole, or cut into fragments.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="for each number (default: 3)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """The peak above what the agent takes before its first round."""
    check_count("--rounds", arguments.rounds, 1)
    found, whole = [], SHAPES[SIZE]
    for count in FRAGMENTS:
        schedule = f", schedule: {{name: strided, period: {STEPS}, num_fragments: {count}}}" if count > 1 else ""
        shape = replace(whole, steps_per_round=STEPS, recipe=whole.recipe + schedule)
        found.append({"fragments": count, **measure_size(shape, arguments.seed, arguments.rounds)})
        say(f"{count}: before {found[-1]['before_mb']:.0f} MB, peak {found[-1]['peak_mb']:.0f} MB")
    rows = [
        Figure(name=f"{one['fragments']} fragments: {what}", value=value, unit="MB")
        for one in found
        for what, value in (("peak", one["peak_mb"]), ("peak above no round", one["peak_mb"] - one["before_mb"]))
    ]
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(rows),
                       options=("--rounds", str(arguments.rounds)), samples={"sizes": found})


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
