"""Memory of an agent with its libp2p daemon, by the size of the model, at rest and while rounds run."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, fit_line, median, run_benchmark
from benchmarks.processes import pss_bytes, read_for, sampled
from benchmarks.vectors import SHAPES, Shape, drive_rounds, leader_of, vector_swarm

NAME = "memory"
ABOUT = "Memory of an agent and its libp2p daemon (PSS), two peers averaging, int8, Nesterov"
PERIOD_S = 0.1
REST_S = 3.0
TIMEOUT_S = 240.0
MAX_INTERCEPT_MB = 350.0
MAX_BYTES_PER_PARAMETER = 12.0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Starts two real agents for each model size and lets them average vectors of that size. PSS is summed over\n"
        "the agent and its daemon; memory shared with the trainer counts half when both sides touch it.",
    )
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="rounds for each size (default: 8)")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models (default: all)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Measure every size and fit a line through the peaks."""
    check_count("--rounds", arguments.rounds, 1)
    check_count("number of --sizes", len(set(arguments.sizes)), 2)
    sizes = []
    for name in dict.fromkeys(arguments.sizes):
        say(f"{name} parameters: starting a bootstrap and two agents")
        sizes.append({"size": name, **measure_size(SHAPES[name], arguments.seed, arguments.rounds)})
        say(f"{name}: before {sizes[-1]['before_mb']:.0f} MB, peak {sizes[-1]['peak_mb']:.0f} MB")
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(sizes), samples={"sizes": sizes})


def measure_size(shape: Shape, seed: int, rounds: int) -> dict[str, Any]:
    """Samples in MB (10^6 bytes) of the first agent: joined, while rounds run, and after them."""
    with vector_swarm(shape, seed, ("first", "second")) as swarm:
        read = partial(pss_bytes, leader_of(swarm.members[0]))
        before = read_for(read, PERIOD_S, REST_S)
        with sampled(read, PERIOD_S) as during:
            drive_rounds(swarm, rounds, TIMEOUT_S)
        after = read_for(read, PERIOD_S, REST_S)
    return {
        "parameters": shape.numel,
        "before_mb": median(before) / 1e6,
        "peak_mb": max(during) / 1e6,
        "after_mb": median(after) / 1e6,
        "during_mb": [round(value / 1e6, 1) for value in during],
    }


def figures(sizes: list[dict[str, Any]]) -> tuple[Figure, ...]:
    """The line through the peaks, then each size's peak against the target line."""
    parameters = [float(size["parameters"]) for size in sizes]
    slope, intercept = fit_line(parameters, [size["peak_mb"] * 1e6 for size in sizes])
    rest_slope, rest_intercept = fit_line(parameters, [size["after_mb"] * 1e6 for size in sizes])
    found = [
        Figure(name="peak: constant", value=intercept / 1e6, unit="MB", limit=MAX_INTERCEPT_MB),
        Figure(name="peak: per parameter", value=slope, unit="B", limit=MAX_BYTES_PER_PARAMETER),
        Figure(name="between rounds: constant", value=rest_intercept / 1e6, unit="MB"),
        Figure(name="between rounds: per parameter", value=rest_slope, unit="B"),
    ]
    for size in sizes:
        limit = MAX_INTERCEPT_MB + MAX_BYTES_PER_PARAMETER * size["parameters"] / 1e6
        found.append(Figure(name=f"{size['size']}: joined, no round yet", value=size["before_mb"], unit="MB"))
        found.append(Figure(name=f"{size['size']}: peak", value=size["peak_mb"], unit="MB", limit=round(limit, 1)))
        found.append(Figure(name=f"{size['size']}: after the rounds", value=size["after_mb"], unit="MB"))
    return tuple(found)


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
