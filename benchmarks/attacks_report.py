"""What `benchmarks.attacks` makes of its rows: its report, its figures, its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.figures import BenchReport, Figure, documents

ABOUT = "A quarter of Byzantine peers against the aggregator of open runs: 16 simulated peers, 4 Byzantine, 60 rounds"
NOTES = """\
Validation loss, and in brackets its excess over the same seed with honest peers only and the plain mean. `absent` is
the plain mean without the four Byzantine peers: the cost of their absence alone. A task of so few steps is noisy; the
rows without an attack show how much. Attacks whose contributions are all dropped end at the same loss, to the last
digit. `dropped` counts contributions to shards over all seeds."""
CLEAN, ABSENT = "none", "absent"
LOSS_LIMIT, DROP_LIMIT = 1.02, 0.01


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """One run.

    Attributes:
        attack: its name; `none` and `absent` are the runs without one.
        val_loss: nats per token; None when it is no number.
        honest_drops_by_gate: which gate dropped the honest.
        counted_as_their_copy: honest contributions dropped as near-duplicates of an attacker's.
        honest_cosine: the mean between honest contributions; None where there is none.
        clean_loss: of the same seed under the plain mean with honest peers only.
        contributions: honest and bad, to all parts.
        passed: see `judged`.
    """

    attack: str
    aggregator: str
    seed: int
    rounds: int
    steps_per_round: int
    val_loss: float | None
    honest_contributions: int
    honest_drops: int
    honest_drops_by_gate: dict[str, int] = field(default_factory=dict)
    bad_contributions: int
    bad_drops: int
    counted_as_their_copy: int = 0
    honest_cosine: float | None = None
    wall_seconds: float = 0.0
    clean_loss: float = math.nan
    contributions: int = 0
    passed: bool = False

    @property
    def above(self) -> float | None:
        """The loss above clean, as a share of it; None without a number."""
        return None if self.val_loss is None else self.val_loss / self.clean_loss - 1.0

    @property
    def honest_dropped(self) -> float:
        """The share of honest contributions that were dropped."""
        return self.honest_drops / self.honest_contributions


def report_of(
    rows: Sequence[AttackRow], *, machine: dict[str, Any], options: tuple[str, ...], setting: dict[str, Any]
) -> BenchReport:
    """The report of all runs so far.

    Args:
        machine: as `describe_machine` gives it.
        options: of the command.
        setting: what the runs have in common.
    """
    return BenchReport(
        name="attacks", about=ABOUT, seed=min(row.seed for row in rows), figures=figures(rows), samples={},
        machine=machine, table=table(rows), notes=NOTES, options=options, more={**setting, "rows": documents(rows)},
    )  # fmt: skip


def figures(rows: Sequence[AttackRow]) -> tuple[Figure, ...]:
    """The worst of each quantity that has a limit, and the same without an attack to compare with."""
    attacked = [row for row in rows if row.attack not in (CLEAN, ABSENT)]
    found = []
    for name, chosen, limit in (
        ("no attack, gated", [r for r in rows if r.attack == CLEAN and r.aggregator == "gated"], None),
        ("Byzantine peers absent, plain mean", [r for r in rows if r.attack == ABSENT], None),
        ("attacked, gated", attacked, 100.0 * (LOSS_LIMIT - 1.0)),
    ):
        excesses = [100.0 * above for row in chosen if (above := row.above) is not None]
        if excesses:
            mean = math.fsum(excesses) / len(excesses)
            found.append(Figure(name=f"{name}: loss above clean, mean", value=mean, unit="%"))
            found.append(Figure(name=f"{name}: loss above clean, worst", value=max(excesses), unit="%", limit=limit))
    if attacked:
        drops = [100.0 * row.honest_drops / row.honest_contributions for row in attacked]
        found.append(Figure(name="honest contributions dropped, worst", value=max(drops), unit="%", limit=1.0))
        failed = len(attacked) - sum(row.passed for row in attacked)
        found.append(Figure(name=f"of {len(attacked)} attacked runs, failed", value=failed, unit="", limit=0))
    return tuple(found)


def table(rows: Sequence[AttackRow]) -> tuple[tuple[str, ...], ...]:
    """Loss above clean by attack and seed."""
    seeds = sorted({row.seed for row in rows})
    cells = {(row.attack, row.aggregator, row.seed): row for row in rows}
    lines = [("attack", "aggregator", *(f"seed {seed}" for seed in seeds), "honest dropped", "bad dropped")]
    for attack, aggregator in dict.fromkeys((row.attack, row.aggregator) for row in rows):
        own = [cells.get((attack, aggregator, seed)) for seed in seeds]
        there = [row for row in own if row is not None]
        lines.append((
            attack, aggregator, *("-" if row is None else _above(row) for row in own),
            f"{100 * sum(r.honest_drops for r in there) / sum(r.honest_contributions for r in there):.2f}%",
            _share(sum(r.bad_drops for r in there), sum(r.bad_contributions for r in there)),
        ))
    return tuple(lines)


def _above(row: AttackRow) -> str:
    return "no number" if row.above is None else f"{row.val_loss:.4f} ({row.above:+.1%})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def judged(row: AttackRow, clean: AttackRow) -> AttackRow:
    """The row with the clean loss of its seed, and whether it passes."""
    assert clean.val_loss is not None, "the run without attackers diverged"
    row = replace(row, clean_loss=clean.val_loss, contributions=row.honest_contributions + row.bad_contributions)
    kept = row.val_loss is not None and row.val_loss <= LOSS_LIMIT * clean.val_loss
    return replace(row, passed=kept and row.honest_dropped < DROP_LIMIT)


def line(row: AttackRow) -> str:
    """One run in a line."""
    drops = f"honest dropped {row.honest_dropped:.2%}"
    bad = f", bad dropped {row.bad_drops / row.bad_contributions:.0%}" if row.bad_contributions else ""
    cosine = "" if row.honest_cosine is None else f", honest cosine {row.honest_cosine:.2f}"
    verdict = "ok    " if row.passed else "FAILED"
    return f"{verdict} {row.attack}, seed {row.seed}: loss {_above(row)}, {drops}{bad}{cosine}"
