"""How much of a slow and distant link is payload: streams of a node, and a state transfer, beside plain TCP."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import Figure, Report, Say, benchmark_parser, check_count, median, run_benchmark
from benchmarks.peers import PeerFailedError, Peers
from peer.errors import UserError
from peer.sim.plan import check_writable
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.relay import Link

NAME = "links"
ABOUT = "Payload as a share of the line rate over one link, one way, between two machines in network namespaces"
NOTES = """\
Two machines as network namespaces; the link between them is a relay in user space with a line rate, a delay in each
direction and a queue of 100 ms, so it competes with the peers for the cores: `TCP` is a plain TCP connection over the
same link in the same run, and what a row reaches of that is what the software costs. `line` counts payload bytes, from
the first request until the receiver has said that it has everything. A state transfer is a snapshot of anchor and
momentum from one donor: opened, verified chunk by chunk and in its file. Loss-free, apart from the queue's overflow."""
RATES, DELAY_MS, STREAMS, REPEATS = (100, 500), 25.0, (1, 2, 4), 3
SECONDS_OF_LINE = 10.0  # so much is sent
import os
SETTINGS = {"ipv4.tcp_congestion_control": os.environ.get("CC","cubic"), "ipv4.tcp_wmem": os.environ.get("WMEM","4096 16384 16777216"), "ipv4.tcp_rmem": os.environ.get("RMEM", "4096 131072 33554432")}
SHARE = 0.9
TIMEOUT_S = 120.0
TCP_HOST, QUIC_HOST = "/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # Okabe and Ito (2008)
HEADER: tuple[str, ...] = ("Mbit/s", "RTT ms", "what", "payload Mbit/s", "of the line", "of plain TCP", "relay CPU s")
Row = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Makes network namespaces (as root; with iproute2 and /dev/net/tun), puts two peers into them, and sends over\n"
        "a shaped link: by plain TCP, by one and more streams of a node over TCP and QUIC, and as a state transfer.",
    )
    lists: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": int}
    parser.add_argument("--mbit", default=list(RATES), help="line rates (default: 100 500)", **lists)
    parser.add_argument("--streams", default=list(STREAMS), help="numbers of streams (default: 1 2 4)", **lists)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS, metavar="N", help="one way (default: 25)")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"of each (default: {REPEATS})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares to this PNG")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> Report:
    """Everything at every line rate."""
    check_count("--repeats", arguments.repeats, 1)
    for flag, path in (("--plot", arguments.plot), ("--report", arguments.report)):
        if path is not None:
            check_writable(path, flag)
    rows: list[Row] = []
    missing: list[Row] = []
    for mbit in dict.fromkeys(arguments.mbit):
        check_count("--mbit", mbit, 1)
        link = Link(mbit=mbit, delay_ms=arguments.delay_ms)
        plain: float | None = None
        for what, work in kinds(link, arguments):
            try:
                row = {"mbit": mbit, "rtt_ms": 2 * arguments.delay_ms, "what": what, **work()}
            except PeerFailedError as error:
                say(f"{mbit} Mbit/s, {what}: {error}")
                missing.append({"mbit": mbit, "what": what, "reason": str(error).splitlines()[0]})
                continue
            row["payload_mbit"] = 8e-6 * row["bytes"] / median(row["seconds"])
            plain = row["payload_mbit"] if what == "TCP" else plain
            row["of_line"] = row["payload_mbit"] / mbit
            row["of_plain"] = row["payload_mbit"] / plain if plain else None
            rows.append(row)
            say(" | ".join(f"{name} {value}" for name, value in zip(HEADER, line(row), strict=True)))
    if not rows:
        raise UserError("nothing could be measured", "see above")
    if arguments.plot is not None:
        draw(arguments.plot, rows)
    options = ["--mbit", *map(str, arguments.mbit), "--delay-ms", f"{arguments.delay_ms:g}",
               "--streams", *map(str, arguments.streams), "--repeats", str(arguments.repeats)]  # fmt: skip
    return Report(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=NOTES,
        table=(HEADER, *map(line, rows)), options=tuple(options), more={"rows": rows, "not_measured": missing},
    )  # fmt: skip


def kinds(link: Link, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What is sent, with how to send it; plain TCP first."""
    size, repeats, seed = int(SECONDS_OF_LINE * 1e6 * link.mbit / 8), arguments.repeats, arguments.seed
    yield "TCP", lambda: send(link, TCP_HOST, 1, size, repeats, seed, plain=True)
    for name, host in (("node, TCP", TCP_HOST), ("node, QUIC", QUIC_HOST)):
        for streams in dict.fromkeys(arguments.streams):
            what = f"{name}, {streams} stream{'s' if streams > 1 else ''}"
            yield what, lambda host=host, streams=streams: send(link, host, streams, size, repeats, seed)
    yield "state transfer", lambda: transfer(link, size, repeats, seed)


@contextmanager
def machines(link: Link, count: int) -> Iterator[tuple[Internet, Any]]:
    """Peer 0 behind the link, the others around one router; -> the internet, and how to start a peer in it."""
    with Internet() as internet:
        internet.behind("peer0", link, big_packets=True)
        for number in range(1, count):
            internet.host(f"peer{number}")
        for namespace in internet.hosts.values():
            for key, value in SETTINGS.items():
                namespace.sysctl(key, value)

        def start(index: int) -> AbstractContextManager[None]:
            return internet.hosts[f"peer{index}"].entered()

        yield internet, start


def send(link: Link, host: str, streams: int, size: int, repeats: int, seed: int, plain: bool = False) -> Row:
    """Transfers of `size` bytes from peer 0 to peer 1."""
    with (
        machines(link, 2) as (internet, start),
        Peers("benchmarks.link_peer", codec="none", numel=size, peers=2, seed=seed, timeout_s=TIMEOUT_S, host=host,
              start=start) as peers,
    ):  # fmt: skip
        peers.meet()
        given = {"streams": streams, "plain": internet.addresses["peer1"] if plain else None}
        peers.ask("send", given)  # windows open up
        before = internet.relays["peer0"].cpu_seconds()
        seconds = [peers.ask("send", given)[0] for _ in range(repeats)]
        relay = (internet.relays["peer0"].cpu_seconds() - before) / repeats
    return {"bytes": size // streams * streams, "seconds": seconds, "relay_cpu_seconds": relay}


def transfer(link: Link, size: int, repeats: int, seed: int) -> Row:
    """Snapshots of `size` bytes from the donor behind the link to a newcomer."""
    numel = size // 8
    with (
        machines(link, 3) as (internet, start),
        Peers("benchmarks.state_peer", codec="int8", numel=numel, peers=3, seed=seed, timeout_s=TIMEOUT_S,
              host=TCP_HOST, start=start) as peers,
    ):  # fmt: skip
        peers.meet()
        given = {"rounds": 2, "fetches": 0, "donors": 1, "pause_s": 0.0, "fetch_s": 0.0}
        peers.ask("work", given)
        given = {**given, "rounds": 0}
        peers.ask("work", {**given, "fetches": 1})
        before = internet.relays["peer0"].cpu_seconds()
        *_, fetched = peers.ask("work", {**given, "fetches": repeats})
        relay = (internet.relays["peer0"].cpu_seconds() - before) / repeats
    if not all(one["right"] for one in fetched):
        raise UserError("a newcomer's state is not the certified one", "this is a bug")
    return {"bytes": 8 * numel, "seconds": [one["ended"] - one["began"] for one in fetched], "relay_cpu_seconds": relay}


def line(row: Row) -> tuple[str, ...]:
    """A row as text."""
    return (
        str(row["mbit"]), f"{row['rtt_ms']:g}", row["what"], f"{row['payload_mbit']:.1f}", f"{row['of_line']:.0%}",
        f"{row['of_plain']:.0%}" if row["of_plain"] is not None else "-", f"{row['relay_cpu_seconds']:.2f}",
    )  # fmt: skip


def figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    """The share of the line that each reaches; nodes and transfers over TCP, what peers use, have a goal."""
    found = []
    for row in rows:
        goal = SHARE if row["what"] in ("node, TCP, 1 stream", "state transfer") else None
        name = f"{row['mbit']} Mbit/s: {row['what']}"
        found.append(Figure(name=name, value=row["of_line"], unit="of the line", limit=goal, at_most=False))
    return tuple(found)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write a PNG: a group of bars for each line rate."""
    picture = Picture(figsize=(7.6, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    kinds_seen, rates = list(dict.fromkeys(row["what"] for row in rows)), list(dict.fromkeys(r["mbit"] for r in rows))
    width = 0.8 / len(kinds_seen)
    for number, (what, colour) in enumerate(zip(kinds_seen, cycle(COLOURS), strict=False)):
        own = [row for row in rows if row["what"] == what]
        places = [rates.index(row["mbit"]) + (number - (len(kinds_seen) - 1) / 2) * width for row in own]
        hatch = "//" if number >= len(COLOURS) else None
        axes.bar(places, [row["of_line"] for row in own], 0.9 * width, color=colour, hatch=hatch, label=what)
    axes.axhline(SHARE, color="#888888", linewidth=0.8, linestyle="--", label="goal")
    axes.set_xticks(range(len(rates)), [f"{rate} Mbit/s" for rate in rates])
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("payload, share of the line rate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Payload over a distant link", fontsize=12, fontweight="bold", loc="left")
    picture.savefig(path, format="png")


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
