"""The seeded search behind the default recipe: `python -m benchmarks.search`."""

from __future__ import annotations

import argparse

from benchmarks.figures import BenchReport, Figure, Say, documents, run_benchmark
from benchmarks.race import (
    BEHIND,
    DATA_PARALLELISM,
    HEADER,
    OPTIMIZERS,
    PEERS,
    Race,
    RunSetup,
    gap,
    race_parser,
    ranking,
    reference_of,
    shortest_round,
)
from peer.errors import UserError
from peer.sim.campaign.plan import load_task

NAME = "search"
ABOUT = "The search behind the default recipe: recipes with a thousandth of the bytes against the best data parallelism"
TASK = "configs/sim/larger.yaml"
TOKENS = 10_755_200  # 50 for each of 215,104 parameters
REDUCTION, GOAL = 1000.0, 1.0
SCREEN = 4
FINALISTS = 3
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
}
AVERAGE = "average=0.75"  # the result alone depends on it, not the training: nothing for a screen of few rounds

DISTINCT = "part"  # the last knob: what is trained in full differs in it
Point = dict[str, str]


def label_of(point: Point, numel: int, steps: int) -> str:
    """A choice of knobs, as `atoll compare` takes it, for a run of so many steps."""
    compressor = point["codec"].removeprefix("compressor=").split(",")[0]
    steps = shortest_round(compressor, numel, REDUCTION, steps)
    inner = point.get("inner", "")
    knobs = [value for knob, value in point.items() if knob != "inner"]
    return "diloco:" + ",".join(filter(None, [f"steps_per_round={steps}", *knobs, AVERAGE, inner]))


def descend(race: Race, tokens: int) -> list[str]:
    """The inner optimizer first, then one knob after the other, each to its best value with the others as they are.

    Returns:
        Labels of different parts, the best first.
    """
    def label(point: Point) -> str:
        return label_of(point, race.numel, race.steps(TOKENS))

    point = {knob: values[0] for knob, values in KNOBS.items()}
    point["inner"] = race.best_inner(label(point) + ",", tokens)[0]
    ranks = dict[str, float]()
    for knob, values in KNOBS.items():
        points = [{**point, knob: value} for value in values]
        rows = race.run([label(each) for each in points], tokens)
        point = points[min(range(len(rows)), key=lambda place: rows[place].rank)]
        if knob == DISTINCT:
            ranks = {row.label: row.rank for row in rows}
    return sorted(ranks, key=ranks.__getitem__)


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Screen on a part of the tokens, train what the screen found best in full."""
    race = Race(load_task(TASK), arguments.resume, TOKENS, say, RunSetup.of(arguments))
    screen = TOKENS // SCREEN
    baselines = race.baselines(screen)
    candidates = descend(race, screen)
    screened = list(race.rows)
    rows = race.run([*baselines, *candidates[:FINALISTS]], TOKENS)
    able = [row for row in rows
            if row.recipe != DATA_PARALLELISM and row.reduction >= REDUCTION and row.loss is not None]  # fmt: skip
    if not able:
        raise UserError(f"every finalist diverges in {TOKENS:,} tokens", "narrow the knobs, or take another --seed")
    best = min(able, key=lambda row: row.rank)
    tried = [row for row in screened if row.recipe != DATA_PARALLELISM]
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed,
        figures=(
            Figure(name="best candidate above the best data parallelism", value=gap(best, reference_of(rows)),
                   unit="%", limit=GOAL),
            Figure(name="of the screen: its best above its best data parallelism",
                   value=gap(min(tried, key=lambda row: row.rank), reference_of(screened)), unit="%"),
            Figure(name="screened: candidates", value=len(tried), unit=""),
            Figure(name="screened: data parallelism", value=len(screened) - len(tried), unit=""),
        ),
        samples={}, table=(HEADER, *ranking(rows), ("", "", "", ""), *ranking(screened)),
        notes=(
            f"{PEERS} simulated peers, {TASK}: {race.numel:,} parameters. Above: {TOKENS:,} tokens, all of the "
            "validation text, the seed of the search; `atoll compare` judges what it recommends on others. Below: the "
            f"screen, {screen:,} tokens and the beginning of that text. Each inner optimizer ({', '.join(OPTIMIZERS)}) "
            "has rates that double or halve until the best has a worse one on either side; data parallelism has the "
            f"same choice by the same rule, and the average of its steps. An optimizer that is {BEHIND:g}% behind in "
            "the screen is not trained in full. Then one knob after the other; a change that lowers the loss of the "
            f"screen stays. In full, {FINALISTS} values of the last knob, with rounds that are as long as the codec "
            f"needs to send {REDUCTION:g} times fewer bytes than fp32 data parallelism.\n{race.note()}"
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
