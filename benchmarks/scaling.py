"""How the gap to data parallelism moves with the size of the model: `python -m benchmarks.scaling`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import COLOURS, BenchReport, Figure, ResumableRows, Say, documents, run_benchmark
from benchmarks.race import (
    DATA_PARALLELISM,
    HEADER,
    PEERS,
    Race,
    RaceRow,
    gap,
    race_parser,
    ranking,
    reference_of,
    with_size,
)
from benchmarks.search import SCREEN, TASK
from peer.errors import UserError
from peer.sim.campaign.plan import load_task
from peer.system.output_files import check_output_file

NAME = "scaling"
ABOUT = "The gap of the default recipe to the best data parallelism, by the size of the model"
SIZES = {"0.03M": (32, 2), "0.1M": (48, 3), "0.2M": (64, 4), "0.8M": (128, 4)}  # channels, layers
TOKENS_EACH = 50
# Charles et al. 2025, arXiv 2503.09799: loss of DiLoCo with 4 replicas over that of data parallelism, fp32, H = 30.
PUBLISHED = {35e6: 3.554 / 3.485, 550e6: 2.673 / 2.653, 2.4e9: 2.332 / 2.326}


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Both sides with their best rate at each size."""
    for flag, path in (("--plot", arguments.plot), ("--report", arguments.report)):
        if path is not None:
            check_output_file(path, flag)
    kept = ResumableRows(RaceRow, arguments.resume)
    rows: list[RaceRow] = []
    for size in dict.fromkeys(arguments.sizes):
        if size not in SIZES:
            raise UserError(f"--sizes {size}: no such size", f"known: {', '.join(SIZES)}")
        race = Race(with_size(load_task(TASK), *SIZES[size]), kept, arguments.jobs, arguments.seed, say)
        tokens = TOKENS_EACH * race.numel
        starts = (f"{DATA_PARALLELISM}:", arguments.recipe + ("," if ":" in arguments.recipe else ":"))
        labels = [start + settings for start in starts for settings in race.best_inner(start, tokens // SCREEN)]
        rows += race.run(labels, tokens)
    gaps = by_size(rows)
    if arguments.plot is not None:
        draw(arguments.plot, gaps)
    options = ("--sizes", *arguments.sizes, "--recipe", arguments.recipe)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, options=options, samples={},
        figures=tuple(Figure(name=f"{numel:,} parameters: gap", value=gap, unit="%") for numel, gap in gaps.items()),
        table=(("parameters", *HEADER), *(
            (f"{numel:,}", *line) for numel in gaps for line in ranking([row for row in rows if row.numel == numel])
        )),
        notes=(
            f"{PEERS} simulated peers, {TASK} with other sizes, {TOKENS_EACH} tokens a parameter. Rates of both inner "
            f"optimizers of both sides were searched on a quarter of the tokens, as in search. The picture has the "
            f"published gaps of DiLoCo beside them (fp32, every 30 steps, 20 tokens a parameter; Charles et al. 2025, "
            f"arXiv 2503.09799).\n{kept.note()}"
        ).strip(),
        more={"rows": documents(rows)},
    )  # fmt: skip


def by_size(rows: Sequence[RaceRow]) -> dict[int, float]:
    """Percent of the best candidate above the best data parallelism, for each number of parameters."""
    found = {}
    for numel in sorted({row.numel for row in rows}):
        own = [row for row in rows if row.numel == numel]
        best = min((row for row in own if row.recipe != DATA_PARALLELISM), key=lambda row: row.rank)
        found[numel] = gap(best, reference_of(own))
    return found


def draw(path: Path, gaps: dict[int, float]) -> None:
    """Write a PNG: gap over parameters, ours and the published ones."""
    picture = Picture(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    published = {numel: 100.0 * (ratio - 1.0) for numel, ratio in PUBLISHED.items()}
    for points, colour, label in (
        (gaps, COLOURS[0], "here: a thousandth of the bytes"),
        (published, COLOURS[1], "DiLoCo as published: a thirtieth"),
    ):
        axes.plot(list(points), list(points.values()), "o-", color=colour, label=label)
        for numel, percent in points.items():
            axes.annotate(f"{percent:+.2f}%", (numel, percent), (0, 7), textcoords="offset points", ha="center",
                          fontsize=8, color=colour)  # fmt: skip
    axes.set_xscale("log")
    axes.axhline(0.0, color="#888888", linewidth=0.8)
    axes.margins(x=0.1, y=0.18)
    axes.set_xlabel("parameters of the model")
    axes.set_ylabel("% of loss above data parallelism")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("The gap by the size of the model, 4 peers", fontsize=12, fontweight="bold", loc="left")
    picture.savefig(path, format="png")


if __name__ == "__main__":
    parser = race_parser(
        NAME, "Trains the default recipe and data parallelism at several sizes, each at its best rate.",
    )
    sizes = f"default: {' '.join(SIZES)}; the last takes hours"
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="SIZE", help=sizes)
    parser.add_argument("--recipe", default="lagoon", metavar="LABEL", help="default: lagoon")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the gaps to this PNG")
    run_benchmark(parser, measure)
