"""What `benchmarks.exchange` makes of its rows: the figures with their goals, the table, the picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import Figure

NAME = "exchange"
ABOUT = "Seconds of averaging one fp32 vector among processes of one machine: Atoll, hivemind's averager, gloo"
NOTES = """\
Seconds are medians, each from the moment that all are ready until the slowest peer holds the mean; MB/s is the size of
the fp32 vector divided by them. Atoll: real nodes and libp2p daemons, signed joins; measured from the first peer that
begins; the time includes the exchange, encrypted and signed, the votes on it, and the outer step with the mean, which
only Atoll takes. A peer hashes the resulting state while its trainer continues, so that counts as CPU seconds alone.
`int2` is the default recipe's codec, with its error feedback on both legs. The group persists from one averaging to the
next, as in production: the joins count, matching and opening streams do not. hivemind 1.1.12:
its DecentralizedAverager with its default part size, in an environment of its own with numpy 2.2.5 (with 2.4 and later
its 8-bit codecs raise inside, average nothing and report success) and bitsandbytes for the block-wise codec; the
all-reduce alone inside the averager's process, from the last peer that begins: matchmaking and all other work do not
count.
gloo: fp32, from the first process after a barrier, the sum alone; nothing is encrypted, signed or checked.
CPU seconds are user and system of all peers' processes for one averaging; `p2pd s` are the libp2p daemons' share. MB is
memory: the increase of the proportional set size (PSS) of a peer with all its processes over its idle value before its
first averaging, of the peer where it is largest, sampled in two averagings of their own that are not timed. With 1M
parameters it is the part that does not grow with the vector: 1 MB of TLS buffers for each other peer, 1 MB of
code that is read for the first time, 1 MB of temporaries. The error is the distance from the true mean over the norm
of one contribution.
Every averaging is checked; one that is not the average within its codec's error, although its system reports success,
counts as wrong and has no time."""
GOAL_CODECS = ("int8", "int4", "int2")
FASTER_THAN_HIVEMIND = {(4, 50_000_000): 4.0, (2, 125_000_000): 4.0}
SLOWER_THAN_GLOO = {(4, 50_000_000): 2.5}
SECONDS = {(4, 1_000_000): 0.06}
MEMORY_RATIO = 1.3
MEMORY_FROM_PARAMS = 10_000_000  # below, buffers of connections and code are most of what there is to see
HEADER: tuple[str, ...] = (
    "peers", "params", "system", "codec", "seconds", "MB/s", "CPU s", "p2pd s", "MB", "error", "wrong",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One system with one codec in one cell of the grid."""

    system: str
    codec: str
    peers: int
    params: int

    @property
    def cell(self) -> tuple[int, int]:
        """Its place in the grid."""
        return self.peers, self.params

    def __str__(self) -> str:
        return f"{self.peers} x {size(self.params)}, {self.system} {self.codec}"


@dataclass(frozen=True, kw_only=True)
class NotMeasured(Run):
    """A run that failed, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ExchangeRow(Run):
    """One run.

    Attributes:
        seconds: of each right averaging.
        mb_per_second: of the fp32 vector, in the median.
        cpu_seconds, cpu_seconds_p2pd: of all peers for one averaging; of this, the libp2p daemons'.
        phases: medians, where there are any.
        relative_error: the largest.
        averagings, wrong: all that were made, and how many of them were not the average.
        peak_memory_bytes: the rise of a peer over its memory at rest, of the peer where it is largest.
        peak_memory_absolute_bytes, idle_memory_bytes: the largest of any peer.
    """

    seconds_median: float
    seconds: tuple[float, ...]
    mb_per_second: float
    cpu_seconds: float
    cpu_seconds_p2pd: float
    phases: dict[str, float]
    relative_error: float
    averagings: int
    wrong: int
    peak_memory_bytes: int
    peak_memory_absolute_bytes: int
    idle_memory_bytes: int


def size(params: int) -> str:
    """`10M`."""
    return f"{params / 1e6:g}M"


def figures(rows: Sequence[ExchangeRow]) -> tuple[Figure, ...]:
    """Ratios in each cell where both sides were measured, with the limit where there is one."""
    found: list[Figure] = []
    for place in dict.fromkeys(row.cell for row in rows):
        cell = [row for row in rows if row.cell == place]
        ours = {row.codec: row for row in cell if row.system == "atoll"}
        for codec in GOAL_CODECS:
            if codec in ours:
                found += _cell_figures(ours[codec], cell)
    return tuple(found)


def _cell_figures(atoll: ExchangeRow, cell: Sequence[ExchangeRow]) -> list[Figure]:
    place, seconds, codec = atoll.cell, atoll.seconds_median, atoll.codec
    name = f"{atoll.peers} x {size(atoll.params)}"
    found = [Figure(name=f"{name}: atoll {codec}", value=seconds, unit="s", limit=SECONDS.get(place))]
    theirs = [row for row in cell if row.system == "hivemind"]
    if theirs:
        best = min(theirs, key=lambda row: row.seconds_median)
        found.append(Figure(
            name=f"{name}: hivemind's fastest ({best.codec}) / atoll {codec}", unit="x",
            value=best.seconds_median / seconds, limit=FASTER_THAN_HIVEMIND.get(place), at_most=False,
        ))
    for row in cell:
        if row.system == "gloo":
            found.append(Figure(
                name=f"{name}: atoll {codec} / gloo", unit="x", value=seconds / row.seconds_median,
                limit=SLOWER_THAN_GLOO.get(place),
            ))
    found.append(Figure(
        name=f"{name}: atoll {codec}, more memory / fp32 size", unit="x",
        value=atoll.peak_memory_bytes / (4 * atoll.params),
        limit=MEMORY_RATIO if atoll.params >= MEMORY_FROM_PARAMS else None,
    ))
    return found


def table(rows: Sequence[ExchangeRow]) -> tuple[tuple[str, ...], ...]:
    """All that was measured."""
    lines = [HEADER]
    for row in rows:
        lines.append((
            str(row.peers), size(row.params), row.system, row.codec, f"{row.seconds_median:.3f}",
            f"{row.mb_per_second:.0f}", f"{row.cpu_seconds:.2f}", f"{row.cpu_seconds_p2pd:.2f}",
            f"{row.peak_memory_bytes / 1e6:.0f}", f"{row.relative_error:.1g}",
            f"{row.wrong} of {row.averagings}",
        ))
    return tuple(lines)


def notes(missing: Sequence[NotMeasured], left_out: Sequence[str] = (), taken_over: str = "") -> str:
    """How to read the table, and what is not in it.

    Args:
        missing: runs that could not be measured, with the `reason`.
        left_out: system and codec of those that were not selected.
        taken_over: `ResumableRows.note`.
    """
    lines = [f"- {one}: {one.reason}." for one in missing]
    lines += [f"- {which}: left out by `--codecs`." for which in left_out]
    sessions = [taken_over] if taken_over else []
    return "\n".join([NOTES, *sessions, *(["", "Not measured:", "", *lines] if lines else [])])


# Okabe and Ito (2008).
_COLOURS = {"atoll": "#0072B2", "hivemind": "#D55E00", "gloo": "#000000"}
_LABEL_GAP = 0.05  # of the axis' height


def draw(path: Path, rows: Sequence[ExchangeRow]) -> None:
    """Write a PNG with one panel for each number of peers."""
    counts = sorted({row.peers for row in rows})
    picture = Picture(figsize=(1.0 + 4.6 * len(counts), 5.0), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for count, axes in zip(counts, panels, strict=True):
        _lines(axes, [row for row in rows if row.peers == count])
        axes.set_title(f"{count} peers")
    for count, axes in zip(counts, panels, strict=True):  # once all lines have had their say about the shared axis
        _labels(axes, [row for row in rows if row.peers == count])
    panels[0].set_ylabel("seconds, slowest peer (log)")
    words = ("Averaging one fp32 vector", "among processes of one machine")
    title = ("\n" if len(counts) == 1 else " ").join(words)  # one panel is not wide enough for a line
    picture.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    picture.savefig(path, format="png")


def _curves(rows: Iterable[ExchangeRow]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row.params):
        curves.setdefault((row.system, row.codec), []).append((row.params, row.seconds_median))
    return curves


def _lines(axes: Axes, rows: Sequence[ExchangeRow]) -> None:
    for (system, _), points in _curves(rows).items():
        axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS[system], markersize=3, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters (log)")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _labels(axes: Axes, rows: Sequence[ExchangeRow]) -> None:
    low, high = map(math.log, axes.get_ylim())
    curves = sorted(_curves(rows).items(), key=lambda curve: curve[1][-1][1])
    heights = apart([(math.log(points[-1][1]) - low) / (high - low) for _, points in curves], _LABEL_GAP)
    for ((system, codec), points), height in zip(curves, heights, strict=True):
        axes.annotate(
            f"{system} {codec}", points[-1], (1.04, height), textcoords="axes fraction", fontsize=8, va="center",
            color=_COLOURS[system],
            arrowprops={"arrowstyle": "-", "color": _COLOURS[system], "linewidth": 0.4, "relpos": (0.0, 0.5)},
        )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Rising places moved by the least squares that make neighbours at least `gap` apart and keep all below 1.

    Source: pool adjacent violators (Ayer et al. 1955) on the places less their share of the gaps.
    """
    pools: list[tuple[float, int]] = []  # mean, how many
    for index, place in enumerate(places):
        mean, count = place - index * gap, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    highest = 1.0 - (len(places) - 1) * gap
    return [min(mean, highest) + index * gap for index, mean in enumerate(means)]
