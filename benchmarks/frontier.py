"""What fewer bytes cost: the gap to data parallelism from 30 to 10,000 times less: `python -m benchmarks.frontier`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import BenchReport, Figure, ResumableRows, Say, check_count, documents, run_benchmark
from benchmarks.race import (
    DATA_PARALLELISM,
    HEADER,
    PEERS,
    Race,
    RaceRow,
    draw_gaps,
    gap,
    race_parser,
    ranking,
    reference_of,
    shortest_round,
)
from benchmarks.search import SCREEN
from peer.sim.campaign.plan import load_task

NAME = "frontier"
ABOUT = "The gap to the best data parallelism by how many times fewer bytes each peer sends"
TASK = "configs/sim/long.yaml"
TOKENS = 3_145_728
REDUCTIONS = (30, 100, 300, 1000, 3000, 10_000)
CODECS = ("compressor=int8", "compressor=int4", "compressor=int2,feedback.decay=1.0")
FEWEST_ROUNDS = 4  # a codec whose rounds would be fewer is left out at that reduction
ROUNDED = 0.95
OUTER = "outer_learning_rate=0.9,outer_momentum=0.7,average=0.75"


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Every codec at every reduction, with the inner settings that the search rule finds at a thousandth."""
    check_count("--tokens", arguments.tokens, 1)
    race = Race(load_task(TASK), ResumableRows(RaceRow, arguments.resume), arguments.jobs, arguments.seed, say)
    screen = arguments.tokens // SCREEN
    baselines = race.best_inner(f"{DATA_PARALLELISM}:", screen)
    reference = reference_of(race.run([f"{DATA_PARALLELISM}:{one}" for one in baselines], arguments.tokens))
    inner = race.best_inner(label_of(CODECS[-1], 1000, race.numel) + ",", screen)[0]
    longest = race.steps(arguments.tokens) // FEWEST_ROUNDS
    rows = race.run(
        [
            f"{label_of(codec, reduction, race.numel)},{inner}"
            for reduction in REDUCTIONS for codec in CODECS
            if shortest_round(compressor_of(codec), race.numel, reduction) <= longest
        ],
        arguments.tokens,
    )
    best = frontier(rows)
    if arguments.plot is not None:
        ticks = {float(reduction): f"{reduction:,}x" for reduction in REDUCTIONS}
        along = "fewer bytes than fp32 data parallelism"
        draw_gaps(arguments.plot, "What fewer bytes cost, 4 peers", along, ticks, by_codec(rows, reference))
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, samples={}, options=("--tokens", str(arguments.tokens)),
        figures=tuple(
            Figure(name=f"{reduction:,} times fewer bytes: gap", value=gap(row, reference), unit="%")
            for reduction, row in best.items()
        ),
        table=(HEADER, *ranking([reference, *rows])),
        notes=(
            f"{PEERS} simulated peers, {TASK}: {race.numel:,} parameters, {arguments.tokens:,} tokens. The figure of "
            f"a reduction is that of the best codec there; a round is as long as its codec needs. Inner settings as "
            f"found with two bits at a thousandth: {inner}."
        ),
        more={"rows": documents([reference, *rows])},
    )  # fmt: skip


def label_of(codec: str, reduction: float, numel: int) -> str:
    """DiLoCo with this codec and the shortest round that sends so many times less."""
    return f"diloco:steps_per_round={shortest_round(compressor_of(codec), numel, reduction)},{codec},{OUTER}"


def compressor_of(codec: str) -> str:
    """The name of the codec alone."""
    return codec.removeprefix("compressor=").split(",")[0]


def frontier(rows: Sequence[RaceRow]) -> dict[int, RaceRow]:
    """The best row of each reduction, of those that reach it but for a last round that is shorter; in few tokens, none
    of the largest ones has a round.
    """
    found = {}
    for reduction in REDUCTIONS:
        if able := [row for row in rows if row.reduction >= ROUNDED * reduction]:
            found[reduction] = min(able, key=lambda row: row.rank)
    return found


def by_codec(rows: Sequence[RaceRow], reference: RaceRow) -> dict[str, dict[float, float]]:
    """Reduction -> gap, for each codec."""
    return {
        compressor_of(codec): {row.reduction: gap(row, reference) for row in rows
                               if f",{codec}," in row.label and row.loss is not None}
        for codec in CODECS
    }  # fmt: skip


if __name__ == "__main__":
    parser = race_parser(
        NAME,
        "Trains DiLoCo with three codecs at six traffics, with rounds as long as the codec needs for them, and data\n"
        "parallelism at its best rate.",
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="T", help=f"of all peers (default: {TOKENS:,})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the gaps to this PNG")
    run_benchmark(parser, measure)
