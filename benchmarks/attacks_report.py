"""What `benchmarks.attacks` makes of its rows: the report on disk, which grows run by run, its figures, its table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchReport, Figure, describe_machine

Row = dict[str, Any]
ABOUT = "A quarter of Byzantine peers against the aggregator of open runs: 16 simulated peers, 4 Byzantine, 60 rounds"
NOTES = """\
Validation loss, and in brackets its excess over the same seed with honest peers only and the plain mean. `absent` is
the plain mean without the four Byzantine peers: the cost of their absence alone. A task of so few steps is noisy; the
rows without an attack show how much. Attacks whose contributions are all dropped end at the same loss, to the last
digit. `dropped` counts contributions to shards over all seeds."""
CLEAN, ABSENT = "none", "absent"
LOSS_LIMIT, DROP_LIMIT = 1.02, 0.01


class Rows:
    """Rows in a report, written after each run: an existing row is not computed again.

    Args:
        path: JSON; created if missing.
        options: of the command.
        setting: what the runs have in common.
    """

    def __init__(self, path: Path, options: tuple[str, ...], setting: dict[str, Any]) -> None:
        self._path, self._options, self._setting, self._machine = path, options, setting, describe_machine()
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []

    def find(self, name: str, aggregator: str, seed: int, rounds: int, steps: int) -> Row | None:
        """The row of this run, if it was made."""
        wanted = (name, aggregator, seed, rounds, steps)
        keys = ("attack", "aggregator", "seed", "rounds", "steps_per_round")
        return next((row for row in self.rows if tuple(row[key] for key in keys) == wanted), None)

    def keep(self, row: Row) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        report = BenchReport(
            name="attacks", about=ABOUT, seed=min(row["seed"] for row in self.rows), figures=figures(self.rows),
            samples={}, machine=self._machine, table=table(self.rows), notes=NOTES, options=self._options,
            more={**self._setting, "rows": self.rows},
        )  # fmt: skip
        self._path.write_text(json.dumps(report.to_dict(), indent=1) + "\n")


def figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    """The worst of each quantity that has a limit, and the same without an attack to compare with."""
    attacked = [row for row in rows if row["attack"] not in (CLEAN, ABSENT)]
    found = []
    for name, chosen, limit in (
        ("no attack, gated", [r for r in rows if r["attack"] == CLEAN and r["aggregator"] == "gated"], None),
        ("Byzantine peers absent, plain mean", [r for r in rows if r["attack"] == ABSENT], None),
        ("attacked, gated", attacked, 100.0 * (LOSS_LIMIT - 1.0)),
    ):
        ratios = [row["val_loss"] / row["clean_loss"] for row in chosen if row["val_loss"] is not None]
        excesses = [100.0 * (ratio - 1.0) for ratio in ratios]
        if excesses:
            mean = math.fsum(excesses) / len(excesses)
            found.append(Figure(name=f"{name}: loss above clean, mean", value=mean, unit="%"))
            found.append(Figure(name=f"{name}: loss above clean, worst", value=max(excesses), unit="%", limit=limit))
    if attacked:
        drops = [100.0 * row["honest_drops"] / row["honest_contributions"] for row in attacked]
        found.append(Figure(name="honest contributions dropped, worst", value=max(drops), unit="%", limit=1.0))
        failed = len(attacked) - sum(row["passed"] for row in attacked)
        found.append(Figure(name=f"of {len(attacked)} attacked runs, failed", value=failed, unit="", limit=0))
    return tuple(found)


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    """Loss above clean by attack and seed."""
    seeds = sorted({row["seed"] for row in rows})
    cells = {(row["attack"], row["aggregator"], row["seed"]): row for row in rows}
    lines = [("attack", "aggregator", *(f"seed {seed}" for seed in seeds), "honest dropped", "bad dropped")]
    for attack, aggregator in dict.fromkeys((row["attack"], row["aggregator"]) for row in rows):
        own = [cells.get((attack, aggregator, seed)) for seed in seeds]
        there = [row for row in own if row is not None]
        lines.append((
            attack, aggregator, *("-" if row is None else _above(row) for row in own),
            f"{100 * sum(r['honest_drops'] for r in there) / sum(r['honest_contributions'] for r in there):.2f}%",
            _share(sum(r["bad_drops"] for r in there), sum(r["bad_contributions"] for r in there)),
        ))
    return tuple(lines)


def _above(row: Row) -> str:
    if row["val_loss"] is None:
        return "no number"
    return f"{row['val_loss']:.4f} ({row['val_loss'] / row['clean_loss'] - 1:+.1%})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def judged(row: Row, clean: Row) -> Row:
    """The row with the clean loss of its seed, and whether it passes."""
    loss, limit = row["val_loss"], LOSS_LIMIT * clean["val_loss"]
    dropped = row["honest_drops"] / row["honest_contributions"]
    return row | {
        "clean_loss": clean["val_loss"],
        "contributions": row["honest_contributions"] + row["bad_contributions"],
        "passed": loss is not None and loss <= limit and dropped < DROP_LIMIT,
    }


def line(row: Row) -> str:
    """One run in a line."""
    loss = "no number" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
    above = "" if row["val_loss"] is None else f" ({row['val_loss'] / row['clean_loss'] - 1:+.1%})"
    drops = f"honest dropped {row['honest_drops'] / row['honest_contributions']:.2%}"
    bad = f", bad dropped {row['bad_drops'] / row['bad_contributions']:.0%}" if row["bad_contributions"] else ""
    cosine = "" if row["honest_cosine"] is None else f", honest cosine {row['honest_cosine']:.2f}"
    verdict = "ok    " if row["passed"] else "FAILED"
    return f"{verdict} {row['attack']}, seed {row['seed']}: loss {loss}{above}, {drops}{bad}{cosine}"
