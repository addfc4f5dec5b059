"""How fast a newcomer gets the state from several donors, and what that costs the donors' rounds."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.exchange_report import size
from benchmarks.figures import (
    BenchReport,
    Say,
    benchmark_parser,
    check_count,
    documents,
    median,
    row_from,
    run_benchmark,
)
from benchmarks.member import DAEMON
from benchmarks.peers import PeerFailedError, Peers, PeersSetup
from benchmarks.processes import available_bytes, cpu_seconds
from benchmarks.shares import equal_shares
from benchmarks.state_transfer_report import ABOUT, HEADER, NAME, NOTES, StateRow, draw, figures, line
from peer.errors import UserError

PARAMS = (10_000_000, 125_000_000)
DONORS = (1, 2, 4)
REPEATS = 5
WARM_UP = 2
TURNS, MOST_TURNS = 12, 20  # with three the median of the same code moved by a tenth
ENOUGH_WRITING = 16  # rounds: with nine of them their median moved by a twentieth
ROUNDS = 6  # without transfers, and then with them, in each turn
PAUSE_IN_ROUNDS = 1.0
PEER_BYTES, PARAMETER_BYTES = 3.5e8, 30.0  # of each: its vectors, its snapshot file, an exchange's temporaries
TIMEOUT_S = 300.0
MEMORY, NEWCOMER_BYTES = Path("/dev/shm"), 10  # of a parameter: the file, and some room


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One transfer to the newcomer.

    Attributes:
        began, ended: `time.monotonic()`.
        chunks: from each donor.
        right: the state is the certified one.
    """

    began: float
    ended: float
    adopt_seconds: float
    chunks: tuple[int, ...]
    right: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


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
    rows: list[StateRow] = []
    missing: list[dict[str, int | str]] = []
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
        more={"rows": documents(rows), "not_measured": missing},
    )  # fmt: skip


def measure_transfer(params: int, donors: int, repeats: int, seed: int) -> StateRow:
    """One cell of the grid.

    Raises:
        PeerFailedError: a peer died, or said nothing in time.
        UserError: it would not fit into memory, or a state was wrong.
    """
    members = max(2, donors)
    needed, free = (members + 1) * (PEER_BYTES + PARAMETER_BYTES * params), available_bytes()
    if needed > free:
        raise UserError(f"needs about {needed / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are available")
    setup = PeersSetup(
        module="benchmarks.state_peer", codec="int8", numel=params, peers=members + 1, seed=seed, timeout_s=TIMEOUT_S
    )
    with in_memory(NEWCOMER_BYTES * params) as folder, Peers(setup) as peers:
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
    if not all(one.right for one in (*first, *fetched, *mixed.transfers)):
        raise UserError("a newcomer's state is not the certified one", "this is a bug")
    found = row(params, donors, first[0], fetched, cpu, quiet, mixed)
    return replace(found, shares=shared, in_memory=folder is not None)


Interval = tuple[float, float]


class Done(NamedTuple):
    """What happened at the same time.

    Attributes:
        rounds: of the donors, each from the last member that begins to the last that ends.
        transfers: to the newcomer.
        written: when donors had finished the snapshot files that they hold.
    """

    rounds: list[Interval]
    transfers: list[Transfer]
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
    return Done([(began, ended) for began, ended in together], [row_from(Transfer, one) for one in fetched], written)


def processor_seconds(peers: Peers) -> tuple[float, float]:
    """Of all peers so far, and of their libp2p daemons."""
    leaders = list(peers.leaders)
    return sum(map(cpu_seconds, leaders)), sum(cpu_seconds(leader, DAEMON) for leader in leaders)


def durations(intervals: Sequence[Interval]) -> tuple[float, ...]:
    """Seconds of each."""
    return tuple(ended - began for began, ended in intervals)


def row(
    params: int, donors: int, first: Transfer, fetched: Sequence[Transfer], cpu: Sequence[float],
    quiet: Sequence[Interval], mixed: Done,
) -> StateRow:  # fmt: skip
    """What is reported of one cell; rounds among `mixed` that no transfer overlaps count as quiet ones."""
    seconds = tuple(one.seconds for one in fetched)
    transfers = times(mixed.transfers)
    among = [one for one in mixed.rounds if overlaps(one, transfers)]
    slowed, slowed_by_writing = durations(among), durations(rounds_of_writing(mixed))
    alone = durations([*quiet, *(one for one in mixed.rounds if one not in among)])
    return StateRow(
        params=params, donors=donors, bytes=8 * params,
        mb_per_second=8e-6 * params / median(seconds), seconds_median=median(seconds), seconds=seconds,
        seconds_first=first.seconds,
        seconds_adopt=median([one.adopt_seconds for one in fetched]),
        seconds_during_rounds=durations(transfers),
        chunks=tuple(one.chunks for one in fetched), cpu_seconds=cpu[0], cpu_seconds_p2pd=cpu[1],
        round_seconds=alone, round_seconds_during=slowed,
        round_seconds_median=median(alone), round_seconds_during_median=median(slowed) if slowed else None,
        delay=median(slowed) / median(alone) if slowed else None,
        round_seconds_writing=slowed_by_writing,
        delay_writing=median(slowed_by_writing) / median(alone) if slowed_by_writing else None,
    )  # fmt: skip


def rounds_of_writing(done: Done) -> list[Interval]:
    """Those in which a donor wrote a snapshot file: from the request of the transfer until it was whole."""
    transfers = times(done.transfers)
    writing = [(began, at) for began, ended in transfers for at in done.written if began < at < ended]
    return [one for one in done.rounds if overlaps(one, writing)]


def times(transfers: Sequence[Transfer]) -> list[Interval]:
    """When each began and ended."""
    return [(one.began, one.ended) for one in transfers]


def overlaps(one: Interval, others: Sequence[Interval]) -> bool:
    """Whether it has a moment with any of the others."""
    return any(one[0] < ended and one[1] > began for began, ended in others)


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
