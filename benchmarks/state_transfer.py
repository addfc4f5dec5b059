"""How fast a newcomer gets the state from several donors, and what that costs the donors' rounds."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.exchange_report import size
from benchmarks.figures import COLOURS, BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from benchmarks.member import DAEMON
from benchmarks.peers import PeerFailedError, Peers
from benchmarks.processes import available_bytes, cpu_seconds
from benchmarks.shares import equal_shares
from peer.errors import UserError
from peer.system.output_files import check_output_file

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
PARAMS = (10_000_000, 125_000_000)
DONORS = (1, 2, 4)
REPEATS = 5
WARM_UP = 2
TURNS, MOST_TURNS = 12, 20  # with three the median of the same code moved by a tenth
ENOUGH_WRITING = 16  # rounds: with nine of them their median moved by a twentieth
ROUNDS = 6  # without transfers, and then with them, in each turn
PAUSE_IN_ROUNDS = 1.0
MB_PER_SECOND = 250.0
DELAY = 1.05
SHORTEST_SHOWN, LONGEST_SHOWN = 0.8, 1.6  # of the ratios in the picture; longer ones are told in words
BESIDE = 0.12  # donors, between the marks of two sizes
GOAL_PARAMS, GOAL_DONORS = 125_000_000, 2
PEER_BYTES, PARAMETER_BYTES = 3.5e8, 30.0  # of each: its vectors, its snapshot file, an exchange's temporaries
TIMEOUT_S = 300.0
MEMORY, NEWCOMER_BYTES = Path("/dev/shm"), 10  # of a parameter: the file, and some room
HEADER: tuple[str, ...] = (
    "params", "donors", "MB/s", "seconds", "first s", "adopt s", "CPU s", "p2pd s", "round s", "during s", "delay",
    "writing",
)
Row = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Starts donors that average among themselves, and a newcomer that downloads their state repeatedly: while\n"
        "they are idle, for the speed, and while they make rounds, for the delay. Every state is checked.",
    )
    lists: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": int}
    parser.add_argument("--params", default=list(PARAMS), help=f"default: {' '.join(map(str, PARAMS))}", **lists)
    parser.add_argument("--donors", default=list(DONORS), help=f"default: {' '.join(map(str, DONORS))}", **lists)
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"transfers (default: {REPEATS})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed and delay over donors to this PNG")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Every number of donors at every size."""
    check_count("--repeats", arguments.repeats, 1)
    for flag, counts, least in (("--params", arguments.params, 1000), ("--donors", arguments.donors, 1)):
        for count in counts:
            check_count(flag, count, least)
    for flag, path in (("--plot", arguments.plot), ("--report", arguments.report)):
        if path is not None:
            check_output_file(path, flag)
    rows: list[Row] = []
    missing: list[Row] = []
    for params in dict.fromkeys(arguments.params):
        for donors in dict.fromkeys(arguments.donors):
            try:
                rows.append(measure_transfer(params, donors, arguments.repeats, arguments.seed))
                say(" | ".join(f"{name} {value}" for name, value in zip(HEADER, line(rows[-1]), strict=True)))
            except (PeerFailedError, UserError) as error:
                say(f"{size(params)} from {donors}: {error}")
                missing.append({"params": params, "donors": donors, "reason": str(error).splitlines()[0]})
    if not rows:
        raise UserError("nothing could be measured", "see above")
    if arguments.plot is not None:
        draw(arguments.plot, rows)
    options = [str(word) for flag in ("params", "donors") for word in (f"--{flag}", *getattr(arguments, flag))]
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=NOTES,
        table=(HEADER, *map(line, rows)), options=(*options, "--repeats", str(arguments.repeats)),
        more={"rows": rows, "not_measured": missing},
    )  # fmt: skip


def measure_transfer(params: int, donors: int, repeats: int, seed: int) -> Row:
    """One cell of the grid.

    Raises:
        PeerFailedError: a peer died, or said nothing in time.
        UserError: it would not fit into memory, or a state was wrong.
    """
    members = max(2, donors)
    needed, free = (members + 1) * (PEER_BYTES + PARAMETER_BYTES * params), available_bytes()
    if needed > free:
        raise UserError(f"needs about {needed / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are available")
    setup: dict[str, Any] = {"codec": "int8", "numel": params, "peers": members + 1, "seed": seed}
    with (
        in_memory(NEWCOMER_BYTES * params) as folder,
        Peers("benchmarks.state_peer", **setup, timeout_s=TIMEOUT_S) as peers,
    ):
        peers.meet()
        work(peers, donors, rounds=WARM_UP)
        first = work(peers, donors, fetches=1).transfers
        before = processor_seconds(peers)
        fetched = work(peers, donors, fetches=repeats).transfers
        cpu = [(after - earlier) / repeats for after, earlier in zip(processor_seconds(peers), before, strict=True)]
        quiet: list[Interval] = []
        mixed = Done([], [], [])
        with equal_shares(list(peers.leaders)) as shared:
            if not shared:
                peers.take_what_is_left(members)
            pause_s = PAUSE_IN_ROUNDS * median(durations(work(peers, donors, rounds=WARM_UP).rounds))
            for turn in range(MOST_TURNS):
                if turn >= TURNS and len(rounds_of_writing(mixed)) >= ENOUGH_WRITING:
                    break
                quiet += work(peers, donors, rounds=ROUNDS, pause_s=pause_s).rounds
                fetch_s = ROUNDS * (median(durations(quiet)) + pause_s)
                done = work(
                    peers, donors, rounds=ROUNDS + 1, pause_s=pause_s, fetches=1, fetch_s=fetch_s, folder=folder
                )
                mixed = mixed.and_then(done)
    if not all(one["right"] for one in (*first, *fetched, *mixed.transfers)):
        raise UserError("a newcomer's state is not the certified one", "this is a bug")
    found = row(params, donors, first[0], fetched, cpu, quiet, mixed)
    return {**found, "shares": shared, "in_memory": folder is not None}


Interval = tuple[float, float]


class Done(NamedTuple):
    """What happened at the same time.

    Attributes:
        rounds: of the donors, each from the last member that begins to the last that ends.
        transfers: to the newcomer.
        written: when donors had finished the snapshot files that they hold.
    """

    rounds: list[Interval]
    transfers: list[Row]
    written: list[float]

    def and_then(self, other: Done) -> Done:
        """Both, one after the other."""
        return Done(self.rounds + other.rounds, self.transfers + other.transfers, self.written + other.written)


@contextlib.contextmanager
def in_memory(num_bytes: int) -> Iterator[str | None]:
    """A folder on no disk for so many bytes of the newcomer; None where no such file system has room for them."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < num_bytes:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield folder


def work(
    peers: Peers, donors: int, *, rounds: int = 0, fetches: int = 0, pause_s: float = 0.0, fetch_s: float = 0.0,
    folder: str | None = None,
) -> Done:  # fmt: skip
    """Rounds of the donors and transfers to the newcomer at the same time; see `StatePeer.work`."""
    given = {"rounds": rounds, "fetches": fetches, "donors": donors, "pause_s": pause_s, "fetch_s": fetch_s}
    *members, fetched = peers.ask("work", {**given, "folder": folder})
    each = zip(*(member["rounds"] for member in members), strict=True)
    together = [tuple(max(ends) for ends in zip(*one, strict=True)) for one in each]
    written = [at for member in members for at in member["written"]]
    return Done([(began, ended) for began, ended in together], fetched, written)


def processor_seconds(peers: Peers) -> tuple[float, float]:
    """Of all peers so far, and of their libp2p daemons."""
    leaders = list(peers.leaders)
    return sum(map(cpu_seconds, leaders)), sum(cpu_seconds(leader, DAEMON) for leader in leaders)


def durations(intervals: Sequence[Interval]) -> list[float]:
    """Seconds of each."""
    return [ended - began for began, ended in intervals]


def row(
    params: int, donors: int, first: Row, fetched: Sequence[Row], cpu: Sequence[float], quiet: Sequence[Interval],
    mixed: Done,
) -> Row:  # fmt: skip
    """What is reported of one cell; rounds among `mixed` that no transfer overlaps count as quiet ones."""
    seconds = [one["ended"] - one["began"] for one in fetched]
    transfers = times(mixed.transfers)
    among = [one for one in mixed.rounds if overlaps(one, transfers)]
    slowed, slowed_by_writing = durations(among), durations(rounds_of_writing(mixed))
    alone = durations([*quiet, *(one for one in mixed.rounds if one not in among)])
    return {
        "params": params, "donors": donors, "bytes": 8 * params,
        "mb_per_second": 8e-6 * params / median(seconds), "seconds_median": median(seconds), "seconds": seconds,
        "seconds_first": first["ended"] - first["began"],
        "seconds_adopt": median([one["adopt_seconds"] for one in fetched]),
        "seconds_during_rounds": durations(transfers),
        "chunks": [one["chunks"] for one in fetched], "cpu_seconds": cpu[0], "cpu_seconds_p2pd": cpu[1],
        "round_seconds": alone, "round_seconds_during": slowed,
        "round_seconds_median": median(alone), "round_seconds_during_median": median(slowed) if slowed else None,
        "delay": median(slowed) / median(alone) if slowed else None,
        "round_seconds_writing": slowed_by_writing,
        "delay_writing": median(slowed_by_writing) / median(alone) if slowed_by_writing else None,
    }  # fmt: skip


def rounds_of_writing(done: Done) -> list[Interval]:
    """Those in which a donor wrote a snapshot file: from the request of the transfer until it was whole."""
    transfers = times(done.transfers)
    writing = [(began, at) for began, ended in transfers for at in done.written if began < at < ended]
    return [one for one in done.rounds if overlaps(one, writing)]


def times(transfers: Sequence[Row]) -> list[Interval]:
    """When each began and ended."""
    return [(one["began"], one["ended"]) for one in transfers]


def overlaps(one: Interval, others: Sequence[Interval]) -> bool:
    """Whether it has a moment with any of the others."""
    return any(one[0] < ended and one[1] > began for began, ended in others)


def line(row: Row) -> tuple[str, ...]:
    """A row as text."""
    seconds = ("seconds_median", "seconds_first", "seconds_adopt", "cpu_seconds", "cpu_seconds_p2pd",
               "round_seconds_median", "round_seconds_during_median", "delay", "delay_writing")  # fmt: skip
    rest = [f"{row[name]:.2f}" if row[name] is not None else "-" for name in seconds]
    return size(row["params"]), str(row["donors"]), f"{row['mb_per_second']:.0f}", *rest


def figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    """Speed and delay of each row; the speed has a goal for several donors of the large state."""
    found = []
    for one in rows:
        name = f"{size(one['params'])} from {one['donors']}"
        goal = MB_PER_SECOND if one["params"] >= GOAL_PARAMS and one["donors"] >= GOAL_DONORS else None
        found.append(
            Figure(name=f"{name}: speed", value=one["mb_per_second"], unit="MB/s", limit=goal, at_most=False)
        )
        for key, what in (("delay", "delay of rounds"), ("delay_writing", "delay of rounds with a snapshot written")):
            if one[key] is not None:
                found.append(Figure(name=f"{name}: {what}", value=one[key], unit="x", limit=DELAY))
        if worst := one["round_seconds_during"]:
            slowest = max(worst) / max(one["round_seconds"])
            found.append(Figure(name=f"{name}: slowest round / slowest without", value=slowest, unit="x"))
    return tuple(found)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write a PNG over the number of donors, in the colours of the sizes: MB/s, and how rounds are delayed."""
    picture = Picture(figsize=(8.4, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    speed, delay = picture.subplots(1, 2)
    sizes = list(dict.fromkeys(one["params"] for one in rows))
    for place, (params, colour) in enumerate(zip(sizes, cycle(COLOURS), strict=False)):
        aside = BESIDE * (place - (len(sizes) - 1) / 2)
        own = sorted((one for one in rows if one["params"] == params), key=lambda one: int(one["donors"]))
        speed.plot([one["donors"] for one in own], [one["mb_per_second"] for one in own], "o-", color=colour,
                   label=f"{size(params)} parameters")  # fmt: skip
        delayed = [one for one in own if one["delay"] is not None]
        delay.plot([one["donors"] + aside for one in delayed], [one["delay"] for one in delayed], "o-", color=colour)
        for one in own:
            speeds = [one["bytes"] / seconds / 1e6 for seconds in one["seconds"]]
            speed.plot([one["donors"]] * len(speeds), speeds, "_", color=colour, alpha=0.6)
            slowed = [seconds / one["round_seconds_median"] for seconds in one["round_seconds_during"]]
            shown = [min(ratio, LONGEST_SHOWN) for ratio in slowed]
            delay.plot([one["donors"] + aside] * len(slowed), shown, "_", color=colour, alpha=0.6)
            if beyond := sorted(ratio for ratio in slowed if ratio > LONGEST_SHOWN):
                words = "\n".join(f"{ratio:.1f}" for ratio in reversed(beyond))
                delay.annotate(f"\N{UPWARDS ARROW}\n{words}", (one["donors"] + aside, LONGEST_SHOWN), (4, 0),
                               textcoords="offset points", color=colour, fontsize=8, va="top")  # fmt: skip
    for axes, goal, label in (
        (speed, MB_PER_SECOND, "MB/s, median and each"),
        (delay, DELAY, "seconds / median without a transfer"),
    ):
        axes.axhline(goal, color="#888888", linewidth=0.8, linestyle="--", label="goal")
        axes.set_xlabel("donors")
        axes.set_ylabel(label)
        axes.set_xticks(sorted({one["donors"] for one in rows}))
        axes.spines[["top", "right"]].set_visible(False)
    speed.set_ylim(bottom=0.0)
    delay.set_ylim(SHORTEST_SHOWN, LONGEST_SHOWN)
    speed.legend(frameon=False)
    speed.set_title("Speed", fontsize=11, loc="left")
    delay.set_title("Rounds of the donors meanwhile", fontsize=11, loc="left")
    picture.suptitle("State transfer to a newcomer", fontsize=12, fontweight="bold", x=0.01, ha="left")
    picture.savefig(path, format="png")


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
