"""What `benchmarks.links` makes of its rows: the figures with their goals, the table, the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import COLOURS, Figure, median

NAME = "links"
ABOUT = "Payload as a share of the line rate over one link, one way, between two machines in network namespaces"
NOTES = """\
Two machines as network namespaces; the link between them is a relay in user space with a line rate, a delay in each
direction and a queue of 100 ms, so it competes with the peers for the cores: `TCP` is a plain TCP connection over the
same link in the same run. Of a packet of 1500 bytes on the line TCP leaves 1448: no share can be above 96.5%. `of the
line` counts payload bytes, from the first request until the receiver has said that it has everything, with the start of
the windows; each row is the median after one transfer that is not counted. The payload takes {line:g} s at line rate
(at 500 Mbit/s: 1 GB, the state of 125M parameters), {quic:g} s over QUIC. TCP's buffers are allowed {buffers} MiB; rows
that say {own} MiB are of this kernel's own setting; congestion control: {control}, and {direct} on direct connections.
`node, direct` is a direct connection, with its opening; state transfer and exchange use those. A state transfer is a
snapshot of anchor and momentum from one donor: opened, verified chunk by chunk and in its file. An exchange is that of
a round of two peers, {numel:.0f}M parameters in int8 that both send and receive at the same time: contributions,
reduced shards and signatures, without matching and votes; `of the line` is of each direction; as much is
sent as in the other rows, in more rounds. CPU seconds are those of all peers with
their daemons, and of the relay, for one transfer. The relay cuts TCP in segments of up to 64 KiB and carries QUIC
packet by packet. The load average of the last minute is that of the whole machine: any excess over that of these few
processes is other work, which competes for the cores. Loss-free, apart from the queue's overflow."""
SHARE, GOALS = 0.9, ("node, direct, 1 stream", "state transfer", "exchange")
HEADER: tuple[str, ...] = (
    "Mbit/s", "RTT ms", "what", "payload Mbit/s", "of the line", "of plain TCP", "peers CPU s", "relay CPU s", "load",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Several transfers of the same: how long each took, and what one cost."""

    bytes: int
    seconds: tuple[float, ...]
    peers_cpu_seconds: float
    relay_cpu_seconds: float
    load_average_1_min: float


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What is sent, over which line."""

    mbit: int
    rtt_ms: float
    what: str


@dataclass(frozen=True, kw_only=True)
class LinkSample(Transfers, Sent):
    """Transfers over a line."""


@dataclass(frozen=True, kw_only=True)
class LinkRow(LinkSample):
    """A sample with its rates.

    Attributes:
        payload_mbit: in the median.
        of_line, of_plain: as a share of the line rate, and of what plain TCP reaches; None where that was not measured.
    """

    payload_mbit: float
    of_line: float
    of_plain: float | None


def shares(sample: LinkSample, plain: float | None) -> LinkRow:
    """A sample with its rates; `plain`: Mbit/s of plain TCP over the same line."""
    payload, of_plain = 8e-6 * sample.bytes / median(sample.seconds), None
    if plain:
        of_plain = payload / plain
    return LinkRow(**vars(sample), payload_mbit=payload, of_line=payload / sample.mbit, of_plain=of_plain)


def line(row: LinkRow) -> tuple[str, ...]:
    """A row as text."""
    return (
        str(row.mbit), f"{row.rtt_ms:g}", row.what, f"{row.payload_mbit:.1f}", f"{row.of_line:.0%}",
        f"{row.of_plain:.0%}" if row.of_plain is not None else "-",
        f"{row.peers_cpu_seconds:.2f}", f"{row.relay_cpu_seconds:.2f}",
        f"{row.load_average_1_min:.1f}",
    )  # fmt: skip


def figures(rows: Sequence[LinkRow]) -> tuple[Figure, ...]:
    """The share of the line that each reaches; nodes and transfers over TCP, what peers use, have a goal."""
    found = []
    for row in rows:
        goal = SHARE if row.what in GOALS else None
        name = f"{row.mbit} Mbit/s: {row.what}"
        found.append(Figure(name=name, value=row.of_line, unit="of the line", limit=goal, at_most=False))
    return tuple(found)


def draw(path: Path, rows: Sequence[LinkRow]) -> None:
    """Write a PNG: a group of bars for each line rate."""
    picture = Picture(figsize=(7.6, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    kinds_seen, rates = list(dict.fromkeys(row.what for row in rows)), list(dict.fromkeys(row.mbit for row in rows))
    width = 0.8 / len(kinds_seen)
    for number, (what, colour) in enumerate(zip(kinds_seen, cycle(COLOURS), strict=False)):
        own = [row for row in rows if row.what == what]
        places = [rates.index(row.mbit) + (number - (len(kinds_seen) - 1) / 2) * width for row in own]
        hatch = "///" if number >= len(COLOURS) else None
        axes.bar(places, [row.of_line for row in own], 0.9 * width, color=colour, hatch=hatch, label=what,
                 edgecolor="white", linewidth=0.0)  # fmt: skip
    axes.axhline(SHARE, color="#888888", linewidth=0.8, linestyle="--", label="goal")
    axes.set_xticks(range(len(rates)), [f"{rate} Mbit/s" for rate in rates])
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("payload, share of the line rate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Payload over a distant link", fontsize=12, fontweight="bold", loc="left")
    picture.savefig(path, format="png")
