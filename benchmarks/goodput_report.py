"""What `benchmarks.goodput` makes of its rows: the figures with their goal, the table, the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import COLOURS, Figure, median

GOAL_RATE, GOAL = 60, 97.0
PUBLISHED = 88.0  # Decoupled DiLoCo (Douillard et al. 2026, arXiv 2604.21428): chips and failures are simulated
HEADER: tuple[str, ...] = (
    "faults an hour", "goodput", "tokens", "rounds", "members", "faults", "to next commit", "to return", "not back",
    "load",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GoodputRow:
    """One swarm at one rate of faults.

    Attributes:
        rate: faults an hour in the whole group.
        tokens, rounds: that were committed within `seconds`.
        members: of a round, on average.
        faults: peers that were killed.
        commit_s: from each kill to the next commit of any survivor, where one came.
        return_s: from each kill to the first round with the victim's contribution, where one came.
    """

    rate: int
    seconds: float
    tokens: int
    rounds: int
    members: float
    faults: int
    commit_s: tuple[float, ...]
    return_s: tuple[float, ...]
    load_average_1_min: float


def goodput(row: GoodputRow, rows: Sequence[GoodputRow]) -> float:
    """Percent: tokens a second in committed rounds, of those without faults."""
    (quiet,) = (one for one in rows if one.rate == 0)
    return 100.0 * (row.tokens / row.seconds) / (quiet.tokens / quiet.seconds)


def figures(rows: Sequence[GoodputRow]) -> tuple[Figure, ...]:
    """Goodput at each rate, and how long a fault is felt."""
    found = []
    for row in rows:
        if row.rate == 0:
            continue
        limited = {"limit": GOAL} if row.rate == GOAL_RATE else {}
        name = f"{row.rate} faults an hour: "
        value = goodput(row, rows)
        found.append(Figure(name=f"{name}goodput", value=value, unit="%", at_most=False, **limited))
        for what, seconds in (("survivors' next commit", row.commit_s), ("the victim's return", row.return_s)):
            if seconds:
                found.append(Figure(name=f"{name}kill to {what}, median", value=median(seconds), unit="s"))
                found.append(Figure(name=f"{name}kill to {what}, longest", value=max(seconds), unit="s"))
    return tuple(found)


def lost_to_starts(rows: Sequence[GoodputRow], peers: int) -> str:
    """How much of what a fault costs is the time in which its victim starts again."""
    points = [
        f"{100.0 * sum(row.return_s) / (peers * row.seconds):.1f} of the {100.0 - goodput(row, rows):.1f} points that "
        f"{row.rate} faults an hour cost" for row in rows if row.rate
    ]  # fmt: skip
    if not points:
        return ""
    away = f"{median([seconds for row in rows for seconds in row.return_s]):.0f} s at the median"
    return f"A victim trains nothing while its processes start, which takes {away}: {', '.join(points)}."


def line(row: GoodputRow, rows: Sequence[GoodputRow]) -> tuple[str, ...]:
    """A row as text."""
    times = [f"{median(seconds):.1f} s" if seconds else "-" for seconds in (row.commit_s, row.return_s)]
    return (
        str(row.rate), f"{goodput(row, rows):.1f}%", f"{row.tokens:,}", str(row.rounds), f"{row.members:.1f}",
        str(row.faults), *times, str(row.faults - len(row.return_s)), f"{row.load_average_1_min:.1f}",
    )  # fmt: skip


def draw(path: Path, rows: Sequence[GoodputRow]) -> None:
    """Write a PNG: goodput by the rate of faults, beside what others have published; and what a fault costs."""
    picture = Picture(figsize=(8.4, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    left, right = picture.subplots(1, 2)
    rates = [row.rate for row in rows]
    left.plot(rates, [goodput(row, rows) for row in rows], "o-", color=COLOURS[0], label="Atoll")
    left.axhline(PUBLISHED, color=COLOURS[1], linestyle=":", label="Decoupled DiLoCo, simulated failures")
    left.set_ylabel("goodput, %", fontsize=8)
    left.legend(frameon=False, fontsize=8)
    for colour, what, taken in zip(
        COLOURS, ("survivors' next commit", "victim's return"), ("commit_s", "return_s"), strict=False
    ):
        points = [(row.rate, seconds) for row in rows for seconds in getattr(row, taken)]
        right.plot(*zip(*points, strict=True) if points else ((), ()), "o", color=colour, alpha=0.6, label=what)
    right.set_ylabel("seconds after a kill", fontsize=8)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("faults an hour and peer group", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    picture.suptitle("Tokens in committed rounds, while peers are killed", fontsize=12, fontweight="bold", x=0.01,
                     ha="left")  # fmt: skip
    picture.savefig(path, format="png")
