"""How many Byzantine peers of 16 the aggregator of open runs bears: `python -m benchmarks.break_point --report FILE`.

As `benchmarks.attacks`, with two to seven Byzantine peers instead of four, who act together in the three attacks that
are hardest to tell from honest work. The plot shows the validation loss above that of the same seed with honest peers
only and the plain mean. Existing rows of the report are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.attacks import ATTACKS, PEERS, TASK, Campaign
from benchmarks.attacks_report import CLEAN, LOSS_LIMIT
from benchmarks.figures import COLOURS, BenchReport, Figure, ResumableRows, describe_machine, documents
from peer.errors import UserError
from peer.outer.aggregate.base import Mean
from peer.outer.aggregate.gated import Gated
from peer.sim.campaign.job import one_thread
from peer.sim.campaign.plan import load_task
from peer.sim.learner.language_task import load_windows
from peer.system.output_files import check_output_file

HARDEST = ("sign-flip", "a little is enough", "inner product")
COUNTS = (2, 3, 4, 5, 6, 7)
PROMISED = PEERS // 4
ROUNDS, STEPS = 30, 5
LARGEST_SHOWN = 1.0  # of the excess in the plot: what is above has learnt nothing
ABOUT = "Two to seven Byzantine peers of 16 against the aggregator of open runs, simulated"
NOTES = (
    "Validation loss, and in brackets its excess over the same seed with honest peers only and the plain mean. "
    "Promised is a quarter; the rows above it show where the aggregator fails, and how."
)


@dataclass(frozen=True, kw_only=True)
class BreakRow:
    """One run.

    Attributes:
        bad: number of Byzantine peers.
        val_loss: nats per token; None when it is no number.
        clean_loss: of the same seed with honest peers only.
        honest_dropped, bad_dropped: shares of their contributions.
    """

    attack: str
    bad: int
    seed: int
    rounds: int
    steps_per_round: int
    val_loss: float | None
    clean_loss: float
    honest_dropped: float
    bad_dropped: float
    wall_seconds: float

    @property
    def above(self) -> float:
        """The loss above clean, as a share of it; infinite without a number."""
        return math.inf if self.val_loss is None else self.val_loss / self.clean_loss - 1.0


def borne(rows: Sequence[BreakRow], limit: float = LOSS_LIMIT - 1.0) -> int:
    """The largest number of Byzantine peers up to which no run lost more; 0 if there is none."""
    failed = [row.bad for row in rows if row.above > limit]
    passed = [row.bad for row in rows if row.above <= limit and row.bad < min(failed, default=PEERS)]
    return max(passed, default=0)


def counts(rows: Sequence[BreakRow]) -> dict[str, int]:
    """For the report of the campaigns."""
    bounded = borne(rows, LARGEST_SHOWN)
    return {"break_point_runs": len(rows), "smallest_borne": borne(rows), "smallest_bounded": bounded}


def figures(rows: Sequence[BreakRow]) -> tuple[Figure, ...]:
    """How far it goes, and the worst of what is promised."""
    promised = [row for row in rows if row.bad <= PROMISED]
    found = [Figure(name="Byzantine peers up to which no run failed", value=borne(rows), unit="of 16",
                    limit=PROMISED, at_most=False)]  # fmt: skip
    if promised:
        worst, limit = 100 * max(row.above for row in promised), 100 * (LOSS_LIMIT - 1)
        found.append(Figure(name="loss above clean, worst of up to 4", value=worst, unit="%", limit=limit))
    return tuple(found)


def table(rows: Sequence[BreakRow]) -> tuple[tuple[str, ...], ...]:
    """Loss by number of Byzantine peers and attack; the mean where there are several seeds."""
    attacks = tuple(dict.fromkeys(row.attack for row in rows))
    lines = [("Byzantine", *attacks, "honest dropped")]
    for bad in sorted({row.bad for row in rows}):
        own = [row for row in rows if row.bad == bad]
        cells = [", ".join(_cell(row) for row in own if row.attack == attack) or "-" for attack in attacks]
        lines.append((f"{bad} of {PEERS}", *cells, f"{max(row.honest_dropped for row in own):.1%}"))
    return tuple(lines)


def _cell(row: BreakRow) -> str:
    return "no number" if row.val_loss is None else f"{row.val_loss:.3f} ({row.above:+.1%})"


def draw(path: Path, rows: Sequence[BreakRow]) -> None:
    """The curve as a PNG."""
    picture = Picture(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    for attack, colour in zip(dict.fromkeys(row.attack for row in rows), COLOURS, strict=False):
        own = [row for row in rows if row.attack == attack]
        bad = sorted({row.bad for row in own})
        worst = [max(row.above for row in own if row.bad == count) for count in bad]
        axes.plot(bad, [100 * min(above, LARGEST_SHOWN) for above in worst], "o-", color=colour, label=attack)
    axes.axhline(100 * (LOSS_LIMIT - 1), color="#888888", linewidth=0.8, linestyle="--", label="limit")
    axes.axvline(PROMISED, color="#888888", linewidth=0.8, linestyle=":", label="promised: a quarter")
    axes.set(xlabel=f"Byzantine peers of {PEERS}", ylabel="validation loss above clean, %", yscale="symlog")
    axes.legend(frameon=False)
    picture.savefig(path, format="png")


def report_of(rows: Sequence[BreakRow], machine: dict[str, Any], options: tuple[str, ...]) -> BenchReport:
    """The report of all runs so far."""
    return BenchReport(
        name="break_point", about=ABOUT, seed=min((row.seed for row in rows), default=0), figures=figures(rows),
        samples={}, machine=machine, table=table(rows), notes=NOTES, options=options,
        more={"peers": PEERS, "task": TASK, "rows": documents(rows)},
    )  # fmt: skip


def places(bad: int, seed: int) -> tuple[int, ...]:
    """Which peers are Byzantine."""
    return tuple(sorted(random.Random(f"{bad} {seed}").sample(range(PEERS), bad)))


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Which runs to make: every attack by so many Byzantine peers, for each seed; and how long each is."""

    counts: Sequence[int] = COUNTS
    attacks: Sequence[str] = HARDEST
    seeds: Sequence[int] = (0,)
    rounds: int = ROUNDS
    steps: int = STEPS


def run(
    report: Path, runs: Runs, *, plot: Path | None = None, minutes: float = math.inf,
    tell: Callable[[Sequence[BreakRow]], None] = lambda _: None,
) -> Sequence[BreakRow]:
    """Make the runs that the report does not hold yet, as far as the minutes allow; -> all rows of these settings.

    Raises:
        UserError: the report cannot be written, or holds something else.
    """
    one_thread()
    seeds, rounds, steps = runs.seeds, runs.rounds, runs.steps
    check_output_file(report, "--report")
    until = time.monotonic() + 60 * minutes
    options = ("--report", "docs/results/break_point.json", "--plot", "docs/results/break_point.png",
               "--seeds", *map(str, seeds), "--rounds", str(rounds), "--steps", str(steps))  # fmt: skip
    kept = ResumableRows(BreakRow, report, report=partial(report_of, machine=describe_machine(), options=options))
    manifest = load_task(TASK)
    campaign = Campaign(manifest=manifest, windows=load_windows(manifest, ()), rounds=rounds, steps=steps)
    for seed in seeds:
        same = {"seed": seed, "rounds": rounds, "steps_per_round": steps}
        before = kept.find(**same)
        clean = before.clean_loss if before is not None else None
        for bad, attack in itertools.product(runs.counts, runs.attacks):
            if kept.find(attack=attack, bad=bad, **same) is not None:
                continue
            if time.monotonic() > until:
                break
            clean = campaign.run(CLEAN, Mean(), seed).val_loss if clean is None else clean
            assert clean is not None, "the run without attackers diverged"
            made = replace(campaign, bad=places(bad, seed)).run(attack, Gated(), seed)
            kept.keep(BreakRow(
                attack=attack, bad=bad, seed=seed, rounds=rounds, steps_per_round=steps,
                val_loss=made.val_loss, clean_loss=clean, wall_seconds=made.wall_seconds,
                honest_dropped=made.honest_dropped, bad_dropped=made.bad_drops / max(1, made.bad_contributions),
            ))  # fmt: skip
            tell([row for row in kept.rows if row.seed in seeds])
            if plot is not None:
                draw(plot, kept.rows)
    return [row for row in kept.rows if (row.rounds, row.steps_per_round) == (rounds, steps) and row.seed in seeds]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.break_point", description=__doc__)
    add = parser.add_argument
    add("--report", type=Path, required=True, metavar="FILE", help="JSON; existing rows are kept")
    add("--plot", type=Path, metavar="FILE", help="draw the curve to this PNG")
    add("--counts", nargs="+", type=int, default=list(COUNTS), metavar="N", help="Byzantine peers (default: 2 to 7)")
    add("--attacks", nargs="+", choices=list(ATTACKS), default=list(HARDEST), metavar="NAME",
        help=f"default: {', '.join(HARDEST)}")  # fmt: skip
    add("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default: 0")
    add("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    add("--steps", type=int, default=STEPS, metavar="N",
        help=f"inner steps of each peer in a round (default: {STEPS})")  # fmt: skip
    add("--max-minutes", type=float, default=math.inf, metavar="M", help="begin no further run after this long")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on a user's error. Nothing is promised above a quarter, so that no run can fail."""
    arguments = build_parser().parse_args(argv)

    def tell(rows: Sequence[BreakRow]) -> None:
        last = rows[-1]
        print(f"{last.bad} of {PEERS}, {last.attack}, seed {last.seed}: {_cell(last)}", flush=True)

    try:
        runs = Runs(
            counts=arguments.counts, attacks=arguments.attacks, seeds=arguments.seeds, rounds=arguments.rounds,
            steps=arguments.steps,
        )  # fmt: skip
        run(arguments.report, runs, plot=arguments.plot, minutes=arguments.max_minutes, tell=tell)
    except UserError as error:
        print(error.render("break_point"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
