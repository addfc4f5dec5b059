"""What `benchmarks.state_transfer` makes of its rows: the figures with their goals, the table, the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.exchange_report import size
from benchmarks.figures import COLOURS, Figure

NAME = "state_transfer"
ABOUT = "A newcomer downloads the outer state (anchor and momentum, fp32) from several donors on one machine"
NOTES = """\
Real nodes and libp2p daemons, one process with one torch thread for each peer. MB/s counts from the newcomer's first
request to the last verified chunk in its file: the donor's chain is checked, every chunk is hashed and written. `first`
is the same if the donors must write their snapshot files first. CPU seconds are those of all peers for one transfer,
`p2pd s` the libp2p daemons' share of them. Rounds are whole (exchange, votes, applied, recorded), among the donors, or
two peers where there is one donor, each after a pause as long as a round: six without transfers and seven with one
transfer after another, alternating twelve times, or up to twenty, until a donor wrote its snapshot file in sixteen of
them: from the request of the transfer that needed it until it was complete. `delay` is the median of the rounds that a
transfer overlaps over the median of those without, and `writing` that of the rounds in which a file was written. In
reality each peer has a machine of its own: during rounds each has exactly an equal share of four fifths of the cores,
whether the others use theirs or not (`shares` in the JSON file; where no control groups can be created, the newcomer
uses what the donors leave, except for the work of the kernel); the rest is the kernel's. The newcomer's file is kept in
memory if there is room (`in_memory`), since its disk is not the donors'; the donors share one disk."""
MB_PER_SECOND = 250.0
DELAY = 1.05
SHORTEST_SHOWN, LONGEST_SHOWN = 0.8, 1.6  # of the ratios in the picture; longer ones are told in words
BESIDE = 0.12  # donors, between the marks of two sizes
GOAL_PARAMS, GOAL_DONORS = 125_000_000, 2
HEADER: tuple[str, ...] = (
    "params", "donors", "MB/s", "seconds", "first s", "adopt s", "CPU s", "p2pd s", "round s", "during s", "delay",
    "writing",
)


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """One cell of the grid; seconds are of each, medians under names of their own.

    Attributes:
        bytes: of the state.
        seconds_first: of a transfer for which the donors wrote their snapshot files.
        seconds_during_rounds: of transfers.
        chunks: of each transfer, from each donor.
        cpu_seconds, cpu_seconds_p2pd: of all peers for one transfer; of this, the libp2p daemons'.
        round_seconds, round_seconds_during, round_seconds_writing: of rounds that no transfer overlaps; that one does;
            in which a donor wrote a snapshot file.
        delay, delay_writing: medians of these over the median of the first; None where there were no such rounds.
        shares: each peer had an equal share of the cores.
        in_memory: the newcomer's file lay on no disk.
    """

    params: int
    donors: int
    bytes: int
    mb_per_second: float
    seconds_median: float
    seconds: tuple[float, ...]
    seconds_first: float
    seconds_adopt: float
    seconds_during_rounds: tuple[float, ...]
    chunks: tuple[tuple[int, ...], ...]
    cpu_seconds: float
    cpu_seconds_p2pd: float
    round_seconds: tuple[float, ...]
    round_seconds_during: tuple[float, ...]
    round_seconds_median: float
    round_seconds_during_median: float | None
    delay: float | None
    round_seconds_writing: tuple[float, ...]
    delay_writing: float | None
    shares: bool = False
    in_memory: bool = False


def line(row: StateRow) -> tuple[str, ...]:
    """A row as text."""
    rest = (
        row.seconds_median, row.seconds_first, row.seconds_adopt, row.cpu_seconds, row.cpu_seconds_p2pd,
        row.round_seconds_median, row.round_seconds_during_median, row.delay, row.delay_writing,
    )  # fmt: skip
    numbers = ("-" if number is None else f"{number:.2f}" for number in rest)
    return size(row.params), str(row.donors), f"{row.mb_per_second:.0f}", *numbers


def figures(rows: Sequence[StateRow]) -> tuple[Figure, ...]:
    """Speed and delay of each row; the speed has a goal for several donors of the large state."""
    found = []
    for one in rows:
        name = f"{size(one.params)} from {one.donors}"
        goal = MB_PER_SECOND if one.params >= GOAL_PARAMS and one.donors >= GOAL_DONORS else None
        found.append(
            Figure(name=f"{name}: speed", value=one.mb_per_second, unit="MB/s", limit=goal, at_most=False)
        )
        delays = {"delay of rounds": one.delay, "delay of rounds with a snapshot written": one.delay_writing}
        for what, delay in delays.items():
            if delay is not None:
                found.append(Figure(name=f"{name}: {what}", value=delay, unit="x", limit=DELAY))
        if worst := one.round_seconds_during:
            slowest = max(worst) / max(one.round_seconds)
            found.append(Figure(name=f"{name}: slowest round / slowest without", value=slowest, unit="x"))
    return tuple(found)


def draw(path: Path, rows: Sequence[StateRow]) -> None:
    """Write a PNG over the number of donors, in the colours of the sizes: MB/s, and how rounds are delayed."""
    picture = Picture(figsize=(8.4, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    speed, delay = picture.subplots(1, 2)
    sizes = list(dict.fromkeys(one.params for one in rows))
    for place, (params, colour) in enumerate(zip(sizes, cycle(COLOURS), strict=False)):
        aside = BESIDE * (place - (len(sizes) - 1) / 2)
        own = sorted((one for one in rows if one.params == params), key=lambda one: one.donors)
        speed.plot([one.donors for one in own], [one.mb_per_second for one in own], "o-", color=colour,
                   label=f"{size(params)} parameters")  # fmt: skip
        delayed = [one for one in own if one.delay is not None]
        delay.plot([one.donors + aside for one in delayed], [one.delay for one in delayed], "o-", color=colour)
        for one in own:
            speeds = [one.bytes / seconds / 1e6 for seconds in one.seconds]
            speed.plot([one.donors] * len(speeds), speeds, "_", color=colour, alpha=0.6)
            slowed = [seconds / one.round_seconds_median for seconds in one.round_seconds_during]
            shown = [min(ratio, LONGEST_SHOWN) for ratio in slowed]
            delay.plot([one.donors + aside] * len(slowed), shown, "_", color=colour, alpha=0.6)
            if beyond := sorted(ratio for ratio in slowed if ratio > LONGEST_SHOWN):
                words = "\n".join(f"{ratio:.1f}" for ratio in reversed(beyond))
                delay.annotate(f"\N{UPWARDS ARROW}\n{words}", (one.donors + aside, LONGEST_SHOWN), (4, 0),
                               textcoords="offset points", color=colour, fontsize=8, va="top")  # fmt: skip
    for axes, goal, label in (
        (speed, MB_PER_SECOND, "MB/s, median and each"),
        (delay, DELAY, "seconds / median without a transfer"),
    ):
        axes.axhline(goal, color="#888888", linewidth=0.8, linestyle="--", label="goal")
        axes.set_xlabel("donors")
        axes.set_ylabel(label)
        axes.set_xticks(sorted({one.donors for one in rows}))
        axes.spines[["top", "right"]].set_visible(False)
    speed.set_ylim(bottom=0.0)
    delay.set_ylim(SHORTEST_SHOWN, LONGEST_SHOWN)
    speed.legend(frameon=False)
    speed.set_title("Speed", fontsize=11, loc="left")
    delay.set_title("Rounds of the donors meanwhile", fontsize=11, loc="left")
    picture.suptitle("State transfer to a newcomer", fontsize=12, fontweight="bold", x=0.01, ha="left")
    picture.savefig(path, format="png")
