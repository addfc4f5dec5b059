"""What fewer bytes cost: the gap to data parallelism from 30 to 10,000 times less: `python -m benchmarks.frontier`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import BenchReport, Figure, Say, check_count, documents, run_benchmark
from benchmarks.race import (
    HEADER,
    PEERS,
    Race,
    RaceRow,
    RunSetup,
    draw_gaps,
    gap,
    most_rounds,
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
AVERAGE = "average=0.75"
OUTER = f"outer_learning_rate=0.9,outer_momentum=0.7,{AVERAGE}"


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Every codec at every reduction with what the search rule finds at a thousandth; the best ones are tuned."""
    check_count("--tokens", arguments.tokens, 1)
    race = Race(load_task(TASK), arguments.resume, arguments.tokens, say, RunSetup.of(arguments))
    screen, steps = arguments.tokens // SCREEN, race.steps(arguments.tokens)
    baselines = race.run(race.baselines(screen), arguments.tokens)
    reference = reference_of(baselines)
    inner = race.best_inner(label_of(CODECS[-1], 1000, race.numel, steps) + ",", screen)[0]
    able = {
        reduction: [codec for codec in CODECS
                    if most_rounds(compressor_of(codec), race.numel, reduction, steps) >= FEWEST_ROUNDS]
        for reduction in REDUCTIONS
    }  # fmt: skip
    rows = race.run(
        [f"{label_of(codec, reduction, race.numel, steps)},{inner}" for reduction in able for codec in able[reduction]],
        arguments.tokens,
    )
    untuned = by_codec(rows, reference)
    for tuned in (other_rates, other_averages):
        best_ones = dict.fromkeys(frontier(rows).values())
        rows += race.run([label for row in best_ones for label in tuned(row.label)], arguments.tokens)
    best = frontier(rows)
    if arguments.plot is not None:
        ticks = {float(reduction): f"{reduction:,}x" for reduction in REDUCTIONS}
        along = "fewer bytes than fp32 data parallelism"
        lines = {"the best, tuned": {float(at): gap(row, reference) for at, row in best.items()}, **untuned}
        draw_gaps(arguments.plot, "What fewer bytes cost, 4 peers", along, ticks, lines)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, samples={}, options=("--tokens", str(arguments.tokens)),
        figures=tuple(
            Figure(name=f"{reduction:,} times fewer bytes: gap", value=gap(row, reference), unit="%")
            for reduction, row in best.items()
        ),
        table=(HEADER, *ranking([*baselines, *rows])),
        notes=(
            f"{PEERS} simulated peers, {TASK}: {race.numel:,} parameters, {arguments.tokens:,} tokens. The figure of "
            f"a reduction is that of the best codec there; a round is as long as its codec needs. Inner settings as "
            f"found with two bits at a thousandth, {inner}; what is best at a reduction has half and twice that rate, "
            f"too, and the last anchor in place of the average of rounds.\n{race.note()}"
        ).strip(),
        more={"rows": documents([*baselines, *rows])},
    )  # fmt: skip


def label_of(codec: str, reduction: float, numel: int, steps: int) -> str:
    """DiLoCo with this codec and the shortest round that sends so many times less."""
    return f"diloco:steps_per_round={shortest_round(compressor_of(codec), numel, reduction, steps)},{codec},{OUTER}"


def compressor_of(codec: str) -> str:
    """The name of the codec alone."""
    return codec.removeprefix("compressor=").split(",")[0]


def other_rates(label: str) -> list[str]:
    """The same with half and with twice the inner rate."""
    head, rate = label.rsplit("=", 1)
    return [f"{head}={float(rate) * factor:g}" for factor in (0.5, 2.0)]


def other_averages(label: str) -> list[str]:
    """The same with the last anchor for its result, which few long rounds want."""
    return [label.replace(f",{AVERAGE}", "")]


def frontier(rows: Sequence[RaceRow]) -> dict[int, RaceRow]:
    """The best row of each reduction, of those that reach it; in few tokens, none of the largest ones has a round."""
    found = {}
    for reduction in REDUCTIONS:
        if able := [row for row in rows if row.reduction >= reduction and row.loss is not None]:
            found[reduction] = min(able, key=lambda row: row.rank)
    return found


def by_codec(rows: Sequence[RaceRow], reference: RaceRow) -> dict[str, dict[float, float]]:
    """Reduction -> the least gap of a row with it, for each codec."""
    found: dict[str, dict[float, float]] = {compressor_of(codec): {} for codec in CODECS}
    for row in sorted(rows, key=lambda row: (row.reduction, -row.rank)):
        if row.loss is not None:
            (codec,) = (codec for codec in CODECS if f",{codec}," in row.label)
            found[compressor_of(codec)][row.reduction] = gap(row, reference)
    return found


if __name__ == "__main__":
    parser = race_parser(
        NAME,
        "Trains DiLoCo with three codecs at six traffics, with rounds as long as the codec needs for them, and data\n"
        "parallelism at its best rate.",
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="T", help=f"of all peers (default: {TOKENS:,})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the gaps to this PNG")
    run_benchmark(parser, measure)
