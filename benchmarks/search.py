"""The seeded search behind the default recipe: `python -m benchmarks.search`."""

from __future__ import annotations

import argparse

from benchmarks.figures import BenchReport, Figure, ResumableRows, Say, documents, run_benchmark
from benchmarks.race import (
    DATA_PARALLELISM,
    HEADER,
    OPTIMIZERS,
    PEERS,
    Race,
    RaceRow,
    gap,
    race_parser,
    ranking,
    reference_of,
    shortest_round,
)
from peer.sim.campaign.plan import load_task

NAME = "search"
ABOUT = "The search behind the default recipe: recipes with a thousandth of the bytes against the best data parallelism"
TASK = "configs/sim/larger.yaml"
TOKENS = 10_755_200  # 50 for each of 215,104 parameters
REDUCTION = 1000.0
SCREEN = 4
FINALISTS = 3
GOAL = 1.0
# What each knob may be set to, the first value to begin with.
KNOBS: dict[str, tuple[str, ...]] = {
    "codec": ("compressor=int2,feedback.decay=1.0", "compressor=int4", "compressor=sign,feedback.decay=1.0"),
    "outer": (
        "outer_learning_rate=0.9,outer_momentum=0.7",
        "outer_learning_rate=0.7,outer_momentum=0.8",
        "outer_learning_rate=1.0,outer_momentum=0.5",
    ),
    "part": (
        "",
        "aggregator=penalised",                                               # edit
        "local.name=pseudo-sync,local.p=0.2,local.eta=0.5",                   # palsgd
        "outer_schedule.restart=8",                                           # restarted-diloco
        "outer_schedule.lazy=0.1,outer_schedule.warmup=0.1",                  # pier
        "outer_schedule.decay_from=0.5,outer_schedule.final_lr=0.4",          # covenant
    ),
    "average": ("average=0.75", "average=0.5", "average=0.9", "average=0"),
}

Point = dict[str, str]


def label_of(point: Point, numel: int) -> str:
    """A choice of knobs, as `atoll compare` takes it."""
    compressor = point["codec"].removeprefix("compressor=").split(",")[0]
    settings = [f"steps_per_round={shortest_round(compressor, numel, REDUCTION)}", *filter(None, point.values())]
    return "diloco:" + ",".join(settings)


def descend(race: Race, tokens: int) -> None:
    """The inner optimizer first, then one knob after the other, each to its best value with the others as they are."""
    point = {knob: values[0] for knob, values in KNOBS.items()}
    point["inner"] = race.best_inner(label_of(point, race.numel) + ",", tokens)[0]
    for knob, values in KNOBS.items():
        labels = [label_of({**point, knob: value}, race.numel) for value in values]
        point[knob] = values[race.best(labels, tokens)]


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Screen on a part of the tokens, train what the screen found best in full."""
    kept = ResumableRows(RaceRow, arguments.resume)
    race = Race(load_task(TASK), kept, arguments.jobs, arguments.seed, say)
    screen = TOKENS // SCREEN
    baselines = race.best_inner(f"{DATA_PARALLELISM}:", screen)
    descend(race, screen)
    screened = list(race.rows)
    candidates = sorted((row for row in screened if row.recipe != DATA_PARALLELISM), key=lambda row: row.rank)
    finalists = [*(f"{DATA_PARALLELISM}:{settings}" for settings in baselines),
                 *(row.label for row in candidates[:FINALISTS])]  # fmt: skip
    rows = race.run(finalists, TOKENS)
    best = min((row for row in rows if row.recipe != DATA_PARALLELISM), key=lambda row: row.rank)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed,
        figures=(
            Figure(name="best candidate above the best data parallelism", value=gap(best, reference_of(rows)),
                   unit="%", limit=GOAL),
            Figure(name="of the screen: its best above its best data parallelism",
                   value=gap(candidates[0], reference_of(screened)), unit="%"),
            Figure(name="screened: candidates", value=len(candidates), unit=""),
            Figure(name="screened: data parallelism", value=len(screened) - len(candidates), unit=""),
        ),
        samples={}, table=(HEADER, *ranking(rows), ("", "", "", ""), *ranking(screened)),
        notes=(
            f"{PEERS} simulated peers, {TASK}: {race.numel:,} parameters. Above: {TOKENS:,} tokens. Below: the screen, "
            f"{screen:,} tokens. Each inner optimizer ({', '.join(OPTIMIZERS)}) has rates that double or halve until "
            "the best has a worse one on either side; data parallelism has the same choice by the same rule. Then one "
            "knob after the other; a change that lowers the loss of the screen stays. Every candidate sends at least "
            f"{REDUCTION:g} times fewer bytes than fp32 data parallelism, so that its codec decides how long a round "
            f"has to be.\n{kept.note()}"
        ).strip(),
        more={"recommended": best.label, "rows": documents([*rows, *screened])},
    )  # fmt: skip


if __name__ == "__main__":
    run_benchmark(
        race_parser(
            NAME,
            "Screens data parallelism and recipes that send a thousandth of its bytes on a quarter of the tokens, and\n"
            "trains the best of both in full. Takes hours; with --resume a search goes on where it stopped. Compare\n"
            "what it recommends on seeds that it did not see, with 'atoll compare'.",
        ),
        measure,
    )
