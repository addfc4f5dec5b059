"""How much of a distant link is payload: streams of a node, a state transfer, an exchange, beside plain TCP."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import (
    RESUME,
    BenchReport,
    ResumableRows,
    Say,
    benchmark_parser,
    check_count,
    documents,
    run_benchmark,
)
from benchmarks.links_report import (
    ABOUT,
    HEADER,
    NAME,
    NOTES,
    LinkRow,
    LinkSample,
    Transfers,
    draw,
    figures,
    line,
    shares,
)
from benchmarks.peers import PeerFailedError, Peers, PeersSetup
from benchmarks.processes import cpu_seconds
from benchmarks.state_transfer import work
from peer.errors import UserError
from peer.outer.compress.registry import compressor
from peer.swarm.net.direct_listener import tune
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.relay import Link

RATES, DELAY_MS, STREAMS, REPEATS = (100, 500), 25.0, (1, 2, 4), 3
SECONDS_OF_LINE, SECONDS_OF_QUIC = 16.0, 4.0  # so much is sent: at 500 Mbit/s the state of 125M parameters
EXCHANGED = 50_000_000  # parameters
BUFFER_MIB = 16
TIMEOUT_S = 120.0
TCP_BUFFERS = {"ipv4.tcp_wmem": "4096 16384", "ipv4.tcp_rmem": "4096 131072"}  # the least and the first, in bytes
TCP_HOST, QUIC_HOST = "/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Makes network namespaces (as root; with iproute2 and /dev/net/tun), puts two peers into them, and sends over\n"
        "a shaped link: by plain TCP, by one and more streams of a node over TCP, by one over QUIC, as a state\n"
        "transfer and as the exchange of a round.",
    )
    lists: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": int}
    parser.add_argument("--mbit", default=list(RATES), help="line rates (default: 100 500)", **lists)
    parser.add_argument("--streams", default=list(STREAMS), help="numbers of streams (default: 1 2 4)", **lists)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS, metavar="N", help="one way (default: 25)")
    buffers = f"what TCP may hold, each way (default: {BUFFER_MIB})"
    parser.add_argument("--buffer-mib", type=int, default=BUFFER_MIB, metavar="N", help=buffers)
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"of each (default: {REPEATS})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares to this PNG")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help=RESUME.format(same="seed, repeats, delay and buffers"))
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Everything at every line rate."""
    for flag, count in (("--repeats", arguments.repeats), ("--buffer-mib", arguments.buffer_mib)):
        check_count(flag, count, 1)
    for mbit in arguments.mbit:
        check_count("--mbit", mbit, 1)
    rows: list[LinkRow] = []
    missing: list[dict[str, int | str]] = []
    under = {name: vars(arguments)[name] for name in ("seed", "repeats", "delay_ms", "buffer_mib")}
    kept = ResumableRows(LinkSample, arguments.resume, under)
    for mbit in dict.fromkeys(arguments.mbit):
        plain: float | None = None
        for what, measured in kinds(ShapedLine(mbit, arguments), arguments):
            try:
                which = {"mbit": mbit, "rtt_ms": 2 * arguments.delay_ms, "what": what}
                row = shares(kept.find(**which) or kept.keep(LinkSample(**which, **vars(measured()))), plain)
            except PeerFailedError as error:
                say(f"{mbit} Mbit/s, {what}: {error}")
                missing.append({"mbit": mbit, "what": what, "reason": str(error).splitlines()[0]})
                continue
            plain = row.payload_mbit if what == "TCP" else plain
            rows.append(row)
            say(" | ".join(f"{name} {value}" for name, value in zip(HEADER, line(row), strict=True)))
    if not rows:
        raise UserError("nothing could be measured", "see above")
    if arguments.plot is not None:
        draw(arguments.plot, rows)
    options = ["--mbit", *map(str, arguments.mbit), "--delay-ms", f"{arguments.delay_ms:g}",
               "--streams", *map(str, arguments.streams), "--buffer-mib", str(arguments.buffer_mib),
               "--repeats", str(arguments.repeats)]  # fmt: skip
    notes = NOTES.format(
        line=SECONDS_OF_LINE, quic=SECONDS_OF_QUIC, buffers=arguments.buffer_mib, own=own_buffer_mib(),
        control=congestion_control(), direct=congestion_control(direct=True), numel=EXCHANGED / 1e6,
    )
    notes = f"{notes}\n{kept.note()}".strip()
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=notes,
        table=(HEADER, *map(line, rows)), options=tuple(options),
        more={"rows": documents(rows), "not_measured": missing},
    )  # fmt: skip


class ShapedLine:
    """One shaped link, and how often what is sent over it.

    Args:
        mbit: its rate.
        arguments: delay, repeats, seed, buffers.
    """

    def __init__(self, mbit: int, arguments: argparse.Namespace) -> None:
        self.link = Link(mbit=mbit, delay_ms=arguments.delay_ms)
        self.repeats, self.seed, self.buffer_mib = arguments.repeats, arguments.seed, arguments.buffer_mib

    def bytes_of(self, seconds: float) -> int:
        """What the line carries in that time, headers included."""
        return int(seconds * 1e6 * self.link.mbit / 8)

    @contextmanager
    def peers(self, module: str, codec: str, numel: int, count: int, host: str, own: bool = False) -> Iterator[Meter]:
        """Peer 0 behind the link, the others around one router; they have met.

        Args:
            own: TCP's buffers stay as this kernel has them.
        """
        with Internet() as internet:
            internet.behind("peer0", self.link, big_packets=True)
            for number in range(1, count):
                internet.host(f"peer{number}")
            for namespace in () if own else internet.hosts.values():
                for key, least in TCP_BUFFERS.items():
                    namespace.sysctl(key, f"{least} {self.buffer_mib << 20}")

            def start(index: int) -> AbstractContextManager[None]:
                return internet.hosts[f"peer{index}"].entered()

            setup = PeersSetup(
                module=module, codec=codec, numel=numel, peers=count, seed=self.seed, timeout_s=TIMEOUT_S, host=host
            )
            with Peers(setup, start=start) as peers:
                peers.meet()
                yield Meter(peers, internet, self.repeats)


@dataclass(frozen=True)
class Meter:
    """What transfers cost."""

    peers: Peers
    internet: Internet
    repeats: int

    def of(self, payload: int, transfer: Callable[[int], list[float]]) -> Transfers:
        """Transfers of so many bytes; `transfer` does so many of them, and says how long each took."""
        transfer(1)
        before = self._spent()
        seconds = transfer(self.repeats)
        peers, relay = ((after - was) / self.repeats for was, after in zip(before, self._spent(), strict=True))
        return Transfers(
            bytes=payload, seconds=tuple(seconds), peers_cpu_seconds=peers, relay_cpu_seconds=relay,
            load_average_1_min=os.getloadavg()[0],
        )

    def _spent(self) -> tuple[float, float]:
        return sum(map(cpu_seconds, self.peers.leaders)), self.internet.relays["peer0"].cpu_seconds()


def kinds(line: ShapedLine, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Transfers]]]:
    """What is sent, with how to send it; plain TCP first."""
    size, own = line.bytes_of(SECONDS_OF_LINE), f"{own_buffer_mib()} MiB"
    yield "TCP", lambda: send(line, TCP_HOST, 1, size, plain=True)
    yield f"TCP, {own}", lambda: send(line, TCP_HOST, 1, size, plain=True, own=True)
    for streams in dict.fromkeys(arguments.streams):
        what = f"node, TCP, {streams} stream{'s' if streams > 1 else ''}"
        yield what, lambda streams=streams: send(line, TCP_HOST, streams, size)  # type: ignore[misc]
    yield "node, direct, 1 stream", lambda: send(line, TCP_HOST, 1, size, direct=True)
    yield "node, QUIC, 1 stream", lambda: send(line, QUIC_HOST, 1, line.bytes_of(SECONDS_OF_QUIC))
    yield "state transfer", lambda: state(line, size)
    yield f"state transfer, {own}", lambda: state(line, size, own=True)
    yield "exchange", lambda: exchange(line)


def send(
    line: ShapedLine, host: str, streams: int, size: int, plain: bool = False, direct: bool = False, own: bool = False
) -> Transfers:
    """Transfers of `size` bytes from peer 0 to peer 1: by plain TCP, directly, or else through libp2p."""
    with line.peers("benchmarks.link_peer", "none", size, 2, host, own) as meter:
        address = meter.internet.addresses["peer1"] if plain else None
        given = {"streams": streams, "direct": direct, "plain": address}
        return meter.of(
            size // streams * streams, lambda times: [meter.peers.ask("send", given)[0] for _ in range(times)]
        )


def state(line: ShapedLine, size: int, own: bool = False) -> Transfers:
    """Snapshots of `size` bytes from the donor behind the link to a newcomer."""
    with line.peers("benchmarks.state_peer", "int8", size // 8, 3, TCP_HOST, own) as meter:
        work(meter.peers, 1, rounds=2)

        def transfer(times: int) -> list[float]:
            fetched = work(meter.peers, 1, fetches=times).transfers
            if not all(one.right for one in fetched):
                raise UserError("a newcomer's state is not the certified one", "this is a bug")
            return [one.seconds for one in fetched]

        return meter.of(size // 8 * 8, transfer)


def exchange(line: ShapedLine) -> Transfers:
    """Rounds of the peer behind the link and another one."""
    with line.peers("benchmarks.state_peer", "int8", EXCHANGED, 3, TCP_HOST) as meter:

        def transfer(times: int) -> list[float]:
            work(meter.peers, 1, rounds=times)
            *members, _ = meter.peers.ask("phases")
            return [max(one["exchange"] for one in each) for each in zip(*members, strict=True)][-times:]

        size = compressor("int8").wire_bytes(EXCHANGED)
        rounds = max(1, round(line.bytes_of(SECONDS_OF_LINE) / size))
        return replace(meter, repeats=rounds * meter.repeats).of(size, transfer)


def own_buffer_mib() -> int:
    """What this kernel allows a TCP connection to hold for sending."""
    return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2]) >> 20


def congestion_control(direct: bool = False) -> str:
    """That of this machine's TCP, or of a direct connection here."""
    with socket.socket() as connection:
        if direct:
            tune(connection)
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
