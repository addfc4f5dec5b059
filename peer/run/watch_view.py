"""What `atoll watch` shows of a run: its place, its loss, its peers, its rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from peer.explain.swarm_state import CurvePoint, PeerView, RoundEvent, SwarmState
from peer.protocol.manifest import RunManifest
from peer.swarm.state.run_control import RunControl
from peer.system.clock import Clock
from peer.telemetry.console import STATE_STYLES, short_id
from peer.telemetry.course import CHART_LINES, Course, LossChart
from peer.telemetry.figures import human_bytes, human_count, human_duration

FEWEST_EVENTS, FEWEST_PEERS = 4, 4
OTHER_LINES = 5  # three of the run, two of the table's head
TALL = 34  # lines of a terminal with room for a higher curve
WIDE = 110
TONES = {"good": "green", "bad": "red", "news": "cyan", "quiet": "dim"}


class WatchView:
    """A run as a terminal shows it; drawn at any width and height.

    Args:
        control: what the organiser has decided.
        clock: unix seconds.
    """

    def __init__(
        self, manifest: RunManifest, state: SwarmState, control: RunControl, clock: Clock = time.time
    ) -> None:
        self.manifest, self.state, self._control, self._clock = manifest, state, control, clock
        self.course = Course(clock=clock)
        self._told: set[str] = set()
        self._line = ""

    def take(self) -> None:
        """The reader has looked again."""
        point = self.state.point()
        self.course.move_end(self._control.rounds_total, self._control.tokens_total)
        if point.peers or point.round:
            self.course.add(point.round, point.tokens, point.loss, point.validation)
            self.course.utilisation = point.utilisation

    def fresh_events(self) -> list[RoundEvent]:
        """Those that were not asked for before."""
        fresh = [event for event in self.state.events if event.key not in self._told]
        self._told = {event.key for event in self.state.events}
        return fresh

    def news(self) -> dict[str, Any]:
        """As JSON types: the newest figures, all peers, and fresh events."""
        return {
            "run": self.manifest.name, "run_id": self.manifest.run_id, "eta_s": self.course.eta_s,
            "point": asdict(self.state.point()), "peers": [asdict(peer) for peer in self.state.peers],
            "events": [{**asdict(event), "seconds": dict(event.seconds)} for event in self.fresh_events()],
        }  # fmt: skip

    def line(self) -> str | None:
        """The run in one line; None while it says what it said before."""
        point = self.state.point()
        line = f"{self.course.in_words()}, {_figures(point)}" if self.course.points else "no peer is known yet"
        same, self._line = line == self._line, line
        return None if same else line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, peers, events = options.size.height - 1, self.state.peers, self.state.events
        chart_lines = CHART_LINES + (4 if height >= TALL else 0)
        room = height - OTHER_LINES - chart_lines
        shown_events = max(FEWEST_EVENTS, room - len(peers))
        shown_peers = max(FEWEST_PEERS, room - shown_events)
        yield Text.assemble((self.manifest.name, "bold"), (f"  {self.manifest.run_id[:12]}", "dim"),
                            f"  recipe {self.manifest.recipe.name}", no_wrap=True, overflow="ellipsis")  # fmt: skip
        if not self.course.points:
            yield Text("no peer is known yet; looking for them", style="yellow")
            return
        yield Text(self.course.in_words(), style="bold", no_wrap=True, overflow="ellipsis")
        yield Text(_figures(self.state.point()), no_wrap=True, overflow="ellipsis")
        yield LossChart(self.course.points, chart_lines)
        yield self._table(peers, shown_peers, options.max_width >= WIDE)
        for event in sorted(events[-shown_events:], key=lambda event: event.at or 0.0):
            at = " " * 8 if event.at is None else time.strftime("%H:%M:%S", time.localtime(event.at))
            yield Text.assemble(
                (f"{at}  round {event.round}  ", "dim"), (event.headline, TONES.get(event.tone, "")),
                no_wrap=True, overflow="ellipsis",
            )  # fmt: skip

    def _table(self, peers: Sequence[PeerView], most: int, wide: bool) -> Table:
        now = self._clock()
        table = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(f"peer ({len(peers)})", no_wrap=True, overflow="ellipsis", min_width=12)
        table.add_column("state", no_wrap=True)
        wide_columns = ("device", "reached", "sent", "here since") if wide else ()
        for header in ("round", "tokens/s", "loss", "valid", "busy", "rounds", *wide_columns):
            table.add_column(header, justify="left" if header == "device" else "right", no_wrap=True,
                             overflow="ellipsis", max_width=22 if header == "device" else None)  # fmt: skip
        ranked = sorted(peers, key=lambda peer: (peer.state == "gone", -peer.tokens_per_s, peer.nickname))
        for peer in ranked[: most if len(ranked) <= most else most - 1]:
            name = Text.assemble(peer.nickname, " ", (short_id(peer.peer_id), "dim"))
            state = Text(peer.state, style=STATE_STYLES.get(peer.state, "red"))
            cells = [
                str(peer.round), human_count(peer.tokens_per_s), _loss(peer.loss), _loss(peer.validation),
                "-" if peer.utilisation is None else f"{peer.utilisation:.0%}", str(peer.rounds),
            ]  # fmt: skip
            if wide:
                since = "-" if peer.since is None else human_duration(max(0.0, now - peer.since))
                cells += [peer.device, peer.reached, human_bytes(peer.bytes_sent), since]
            table.add_row(name, state, *map(Text, cells), style="dim" if peer.state == "gone" else "")
        if len(ranked) > most:
            table.add_row(Text(f"and {len(ranked) - most + 1} more", style="dim"))
        return table


def _figures(point: CurvePoint) -> str:
    peers = "1 peer trains" if point.peers == 1 else f"{point.peers} peers train"
    losses = f", loss {_loss(point.loss)}" if point.loss is not None else ""
    losses += f", validation {_loss(point.validation)}" if point.validation is not None else ""
    return f"{peers}, {human_count(point.tokens_per_s)} tokens/s, {human_count(point.tokens)} tokens committed{losses}"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
