"""What `benchmarks.wan` makes of its rows: the figures with their goals, the table, the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import COLOURS, Figure, median

GOAL, GOAL_WITH_A_SLOW_ONE, TOLERANCE = 99.0, 95.0, 1.2
HEADER: tuple[str, ...] = (
    "recipe", "Mbit/s", "slow peer", "computing", "least", "rounds", "members", "MB a round", "peak Mbit/s", "load",
)  # fmt: skip
Sent = tuple[float, float]
"""(seconds, bytes since the start)."""


@dataclass(frozen=True, kw_only=True)
class WanRow:
    """One recipe on one kind of line.

    Attributes:
        slow: whether one peer makes a step in ten times the time.
        computing: percent of its time that each peer was in a step, the slow one last.
        rounds, members: that the first peer committed, and how many were in them on average.
        bytes_a_round: that it sent, on the wire.
        peak_mbit: its mean rate in the busiest window of `window_s`.
        sent: of its line, every half second.
    """

    recipe: str
    waits: bool
    mbit: float
    slow: bool
    computing: tuple[float, ...]
    rounds: int
    members: float
    bytes_a_round: float
    window_s: float
    peak_mbit: float
    load_average_1_min: float
    sent: tuple[Sent, ...]

    @property
    def what(self) -> str:
        """As the table calls it."""
        return f"{self.recipe}, waiting" if self.waits else self.recipe


def peak_mbit(sent: Sequence[Sent], window_s: float) -> float:
    """The highest mean rate in any window of that length."""
    most = 0.0
    for index, (began, before) in enumerate(sent):
        later = [(at, total) for at, total in sent[index:] if at <= began + window_s + 1e-9]
        most = max(most, later[-1][1] - before)
    return 8e-6 * most / window_s


def figures(rows: Sequence[WanRow], fragments: int) -> tuple[Figure, ...]:
    """Computing of each recipe, and the peak of streaming beside that of DiLoCo."""
    found = []
    for row in rows:
        if row.slow:
            others = row.computing[:-1]
            name, goal = f"{row.what}, one slow peer: least of the others", GOAL_WITH_A_SLOW_ONE
            found.append(Figure(name=name, value=min(others), unit="%", limit=goal, at_most=False))
        else:
            limited = {} if row.waits or row.recipe == "ddp" else {"limit": GOAL}
            name = f"{row.what}, {row.mbit:g} Mbit/s: computing"
            found.append(Figure(name=name, value=median(row.computing), unit="%", at_most=False, **limited))
    fast = max(row.mbit for row in rows)
    compared = [row for row in rows if row.mbit == fast and row.rounds and not (row.waits or row.slow)]
    peaks = {row.recipe: row.peak_mbit for row in compared}
    if {"diloco", "streaming-diloco"} <= peaks.keys():
        limit = 100.0 * TOLERANCE / fragments
        looks = {row.recipe: peak(row) for row in compared}
        window_s = rows[0].window_s
        for name, seen in ((f"in {window_s:g} s", peaks), ("between two looks", looks)):
            share = 100.0 * seen["streaming-diloco"] / seen["diloco"]
            what = f"peak of streaming-diloco over diloco's, {name}"
            found.append(Figure(name=what, value=share, unit="%", limit=limit))
    return tuple(found)


def line(row: WanRow) -> tuple[str, ...]:
    """A row as text."""
    return (
        row.what, f"{row.mbit:g}", "yes" if row.slow else "no", f"{median(row.computing):.1f}%",
        f"{min(row.computing):.1f}%", str(row.rounds), f"{row.members:.1f}", f"{row.bytes_a_round / 1e6:.2f}",
        f"{row.peak_mbit:.2f}", f"{row.load_average_1_min:.1f}",
    )  # fmt: skip


def draw(path: Path, rows: Sequence[WanRow]) -> None:
    """Write a PNG: the rate at which the first peer sends, over time; a panel for each line without a slow peer."""
    shown = [row for row in rows if not row.slow]
    rates = sorted({row.mbit for row in shown})
    picture = Picture(figsize=(8.4, 1.5 * len(shown) + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    ordered = [row for rate in rates for row in shown if row.mbit == rate]
    colours = dict(zip(dict.fromkeys(row.what for row in ordered), cycle(COLOURS), strict=False))
    for axes, row in zip(panels, ordered, strict=True):
        times = [at for at, _ in row.sent[1:]]
        rate = [8e-6 * (total - before) / (at - since) for (since, before), (at, total) in pairwise(row.sent)]
        axes.fill_between(times, rate, step="pre", color=colours[row.what], linewidth=0.0, alpha=0.85)
        axes.set_ylim(0.0, 1.1 * max(map(peak, (other for other in shown if other.mbit == row.mbit))))
        axes.set_title(f"{row.what}, {row.mbit:g} Mbit/s", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("Mbit/s", fontsize=8)
    panels[-1].set_xlabel("seconds")
    picture.suptitle("What one of four peers sends", fontsize=12, fontweight="bold", x=0.01, ha="left")
    picture.savefig(path, format="png")


def peak(row: WanRow) -> float:
    """The highest rate between two looks."""
    return max(8e-6 * (total - before) / (at - since) for (since, before), (at, total) in pairwise(row.sent))
