"""How the gap to data parallelism moves with the size of the model: `python -m benchmarks.scaling`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import BenchReport, Figure, Say, check_count, documents, run_benchmark
from benchmarks.race import (
    AVERAGED_BASELINE,
    DATA_PARALLELISM,
    HEADER,
    PEERS,
    Race,
    RaceRow,
    RunSetup,
    draw_gaps,
    gap,
    race_parser,
    ranking,
    reference_of,
)
from benchmarks.search import SCREEN, TASK
from peer.errors import UserError
from peer.protocol.manifest import RunManifest
from peer.sim.campaign.plan import load_task, meta_layout

NAME = "scaling"
ABOUT = "The gap of the default recipe to the best data parallelism, by the size of the model"
SIZES = {"0.03M": (32, 2), "0.1M": (48, 3), "0.2M": (64, 4), "0.3M": (80, 4), "0.8M": (128, 4)}  # channels, layers
TOKENS_EACH = 50
LEAST_SCREEN = 2_688_800  # of the smallest screen: fewer have too few rounds
# Charles et al. 2025, arXiv 2503.09799: parameters, loss of DiLoCo with 4 replicas (fp32, H = 30), of data parallelism.
LOSSES = ((35e6, 3.554, 3.485), (550e6, 2.673, 2.653), (2.4e9, 2.332, 2.326))
PUBLISHED = {numel: 100.0 * (diloco / together - 1.0) for numel, diloco, together in LOSSES}


@dataclass(frozen=True)
class Races:
    """The runs of all sizes.

    Attributes:
        full: after all tokens.
        early: the best of the search, of each side, where it was made on a SCREENth of the tokens.
        notes: of the races.
    """

    full: list[RaceRow] = field(default_factory=list)
    early: list[RaceRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Both sides with their best rate at each size."""
    check_count("--tokens-each", arguments.tokens_each, 1)
    check_count("--peers", arguments.peers, 2)
    races = run_races(arguments, say)
    gaps, early = by_size(races.full), by_size(races.early)
    each, fewer = arguments.tokens_each, f"{arguments.tokens_each / SCREEN:g} tokens a parameter"
    if arguments.plot is not None:
        lines = {
            f"here: {arguments.recipe}, {each} tokens a parameter": gaps,
            f"here, {fewer}": early,
            "DiLoCo as published: a thirtieth of the bytes": PUBLISHED,
        }
        title, along = f"The gap by the size of the model, {arguments.peers} peers", "parameters of the model"
        draw_gaps(arguments.plot, title, along, {}, {name: line for name, line in lines.items() if line})
    options = ("--sizes", *arguments.sizes, *(("--searched", *arguments.searched) if arguments.searched else ()))
    options += ("--tokens-each", str(each), "--recipe", arguments.recipe)
    options += ("--peers", str(arguments.peers)) * (arguments.peers != PEERS)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, options=options, samples={},
        figures=tuple(
            Figure(name=f"{numel:,} parameters{after}: gap", value=gap, unit="%")
            for after, line in (("", gaps), (f", {fewer}", early)) for numel, gap in line.items()
        ),
        table=(("parameters", "tokens", *HEADER), *table(races.full), *table(races.early)),
        notes=(
            f"{arguments.peers} simulated peers, {TASK} with other sizes, {each} tokens a parameter, so that a larger "
            "model has more rounds, too. Rates of both inner optimizers of both sides were searched on a quarter of "
            f"the tokens, at least {LEAST_SCREEN:,}, as in search; where it was a quarter, the best runs of the search "
            "stand beside the full ones (without an average of the steps). The picture has the published gaps of "
            "DiLoCo beside them (fp32, every 30 steps, 20 tokens a parameter; Charles et al. 2025, arXiv 2503.09799)."
            + "".join(f"\n{note}" for note in races.notes)
        ),
        more={"rows": documents([*races.full, *races.early])},
    )  # fmt: skip


def run_races(arguments: argparse.Namespace, say: Say) -> Races:
    """Search the rates at each size; then, unless only the search is wanted, run the best on all tokens."""
    races = Races()
    for flag, sizes in (("--sizes", arguments.sizes), ("--searched", arguments.searched)):
        if unknown := [size for size in sizes if size not in SIZES]:
            raise UserError(f"{flag} {unknown[0]}: no such size", f"known: {', '.join(SIZES)}")
    for size in dict.fromkeys([*arguments.sizes, *arguments.searched]):
        manifest = with_size(load_task(TASK), *SIZES[size])
        tokens = arguments.tokens_each * meta_layout(manifest).numel
        race = Race(manifest, arguments.resume, tokens, say, RunSetup.of(arguments, arguments.peers))
        start = arguments.recipe + ("," if ":" in arguments.recipe else ":")
        screen = max(tokens // SCREEN, min(tokens, LEAST_SCREEN))
        labels = [start + settings for settings in race.best_inner(start, screen)]
        labels += race.baselines(screen)
        if screen * SCREEN == tokens:
            races.early.extend(race.run([label for label in labels if AVERAGED_BASELINE not in label], screen))
        if size in arguments.sizes:
            races.full.extend(race.run(labels, tokens))
        races.notes.extend(filter(None, [race.note()]))
    return races


def table(rows: Sequence[RaceRow]) -> Iterator[tuple[str, ...]]:
    """The ranking of each size."""
    for numel in sorted({row.numel for row in rows}):
        own = [row for row in rows if row.numel == numel]
        for line in ranking(own):
            yield f"{numel:,}", f"{own[0].tokens:,}", *line


def by_size(rows: Sequence[RaceRow]) -> dict[float, float]:
    """Percent of the best candidate above the best data parallelism, for each number of parameters."""
    found: dict[float, float] = {}
    for numel in sorted({row.numel for row in rows}):
        own = [row for row in rows if row.numel == numel]
        best = min((row for row in own if row.recipe != DATA_PARALLELISM), key=lambda row: row.rank)
        found[numel] = gap(best, reference_of(own))
    return found


def with_size(manifest: RunManifest, hidden: int, layers: int) -> RunManifest:
    """The same task for a model of so many layers of so many channels, with Llama's proportions."""
    config = {**manifest.model.config, "hidden_size": hidden, "intermediate_size": -(-hidden * 8 // 12) * 4,
              "num_hidden_layers": layers}  # fmt: skip
    return manifest.model_copy(update={"model": manifest.model.model_copy(update={"config": config})})


if __name__ == "__main__":
    parser = race_parser(
        NAME, "Trains the default recipe and data parallelism at several sizes, each at its best rate.",
    )
    sizes = f"of {' '.join(SIZES)} (default: all but the last: sixteen hours on two cores, or give it --device cuda)"
    parser.add_argument("--sizes", nargs="+", default=list(SIZES)[:-1], metavar="SIZE", help=sizes)
    quarter = f"sizes of which only the search is made, on 1/{SCREEN} of the tokens (default: none)"
    parser.add_argument("--searched", nargs="+", default=[], metavar="SIZE", help=quarter)
    tokens = f"a parameter (default: {TOKENS_EACH})"
    parser.add_argument("--tokens-each", type=int, default=TOKENS_EACH, metavar="N", help=tokens)
    parser.add_argument("--peers", type=int, default=PEERS, metavar="N", help=f"default: {PEERS}")
    parser.add_argument("--recipe", default="lagoon", metavar="LABEL", help="default: lagoon")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the gaps to this PNG")
    run_benchmark(parser, measure)
