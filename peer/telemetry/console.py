"""What a person sees on a terminal: the swarm as a live table with the last events underneath, and the log."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from peer.system.clock import Clock
from peer.telemetry.course import CHART_LINES, Course, LossChart
from peer.telemetry.figures import human_bytes, human_count
from peer.telemetry.lines import LinesFile
from peer.telemetry.metrics import JsonLog, PlainLog
from peer.telemetry.status import PeerRow
from peer.telemetry.write_guard import WriteGuard

log = logging.getLogger(__name__)

REFRESH_HZ = 4
NOTES_KEPT = 6
SUMMARY_PERIOD_S = 10.0
SHORT_ID_CHARS = 6
OTHER_LINES = 10  # of the terminal: the table's frame, the place of the run, a few lines of the log above
WIDE_COLUMNS = 92
MAX_LOG_BYTES = 16 * 2**20  # of peer.log
KEPT_LOGS = 2
FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONSOLE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
STATE_STYLES = {
    "starting": "yellow", "joining": "yellow", "paused": "yellow",
    "training": "green", "finished": "cyan", "left": "cyan", "killed": "red",
}
_ON_DISPLAY = "on_display"
CONSOLE = "the console"


@dataclass(frozen=True, kw_only=True)
class Note:
    """One event under the table; `time` in unix seconds."""

    time: float
    text: str


def short_id(peer_id: str) -> str:
    """The end of a peer id, which is the part in which ids differ."""
    return peer_id[-SHORT_ID_CHARS:]


def swarm_table(
    rows: Sequence[PeerRow], *, title: str, own_id: str | None = None, notes: Sequence[Note] = (),
    course: Course | None = None,
) -> RenderableType:  # fmt: skip
    """The swarm as a table with totals, and the last events underneath; whole at 80 columns, roomier from 92 on.

    Args:
        rows: one per peer, in the order to show.
        own_id: this peer's row is set in bold.
        notes: oldest first.
        course: of the run: its place, and its loss as a curve where the terminal has room for it.
    """
    return _SwarmTable(rows=tuple(rows), title=title, own_id=own_id, notes=tuple(notes), course=course)


@dataclass(frozen=True, kw_only=True)
class _SwarmTable:
    """Fits itself to the width it is drawn at: below 92 columns the gaps are single and the group size is left out."""

    rows: tuple[PeerRow, ...]
    title: str
    own_id: str | None
    notes: tuple[Note, ...]
    course: Course | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.max_width < WIDE_COLUMNS
        table = Table(
            title=self.title, title_justify="left", title_style="bold", box=box.HORIZONTALS, show_edge=False,
            pad_edge=False, padding=(0, 0 if narrow else 1, 0, 0), show_footer=bool(self.rows), footer_style="bold",
        )
        table.add_column("peer", _peers(self.rows), no_wrap=True, overflow="ellipsis", min_width=12)
        table.add_column("state", no_wrap=True)
        skipped = {"group"} if narrow else set()
        figures = [column for column in _figure_columns(self.rows) if column[0] not in skipped]
        for header, footer in figures:
            table.add_column(header, footer, justify="right", no_wrap=True)
        for row in self.rows:
            cells = _cells(row)
            style = "bold" if row.peer_id == self.own_id else "dim" if row.state == "killed" else ""
            name = Text.assemble(row.nickname, " ", (short_id(row.peer_id), "dim"))
            state = Text(row.state, style=STATE_STYLES.get(row.state, ""))
            table.add_row(name, state, *(cells[header] for header, _ in figures), style=style)
        yield table
        if self.course is not None and self.course.points:
            room = options.size.height - len(self.rows) - len(self.notes) - OTHER_LINES
            yield Text(self.course.in_words(), style="bold")
            if room >= CHART_LINES:
                yield LossChart(self.course.points)
        if self.notes:
            yield Text()
        for note in self.notes:
            yield Text(f"{time.strftime('%H:%M:%S', time.localtime(note.time))}  {note.text}", overflow="fold")


class LiveSwarm:
    """The table on a terminal, redrawn four times a second; on anything else, plain log lines.

    Args:
        console: shared with the log handler, so that log lines appear above the table.
        own_id: peer id to set in bold.
        live: None asks the console whether it is a terminal.
        guard: notes when the console cannot be written.
        clock: unix seconds, for the notes.
        course: of the run, drawn under the table.
    """

    def __init__(
        self, console: Console, *, title: str, own_id: str | None = None, live: bool | None = None,
        guard: WriteGuard | None = None, clock: Clock = time.time, course: Course | None = None,
    ) -> None:  # fmt: skip
        self.title, self.course = title, course
        self._guard = guard or WriteGuard()
        self.own_id = own_id
        self._clock = clock
        self._rows: tuple[PeerRow, ...] = ()
        self._notes: deque[Note] = deque(maxlen=NOTES_KEPT)
        self._summary = ""
        self._summary_at = float("-inf")
        self._live: Live | None = None
        if console.is_terminal if live is None else live:
            self._live = Live(self._table(), console=console, refresh_per_second=REFRESH_HZ, transient=False)

    def __enter__(self) -> LiveSwarm:
        if self._live is not None:
            with self._guard.writing(CONSOLE):
                self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            with self._guard.writing(CONSOLE):
                self._live.stop()

    def update(self, rows: Iterable[PeerRow]) -> None:
        """Show these peers; without a terminal, log a summary when it changes, at most every ten seconds."""
        self._rows = tuple(rows)
        if self._live is not None:
            self._live.update(self._table())
            return
        now = self._clock()
        summary = _summary(self._rows)
        if self._rows and summary != self._summary and now - self._summary_at >= SUMMARY_PERIOD_S:
            self._summary, self._summary_at = summary, now
            log.info("%s", f"{summary}; {place}" if self.course and (place := self.course.in_words()) else summary)

    def advance(self, round: int, tokens: int, validation: float | None, utilisation: float | None) -> None:
        """The place of the run now; its training loss is the mean of the peers' that are shown."""
        if self.course is not None:
            losses = [row.loss for row in self._rows if row.loss is not None and row.state == "training"]
            self.course.add(round, tokens, sum(losses) / len(losses) if losses else None, validation)
            self.course.utilisation = utilisation

    def note(self, text: str) -> None:
        """Show an event under the table, and log it."""
        self._notes.append(Note(time=self._clock(), text=text))
        log.info("%s", text, extra={_ON_DISPLAY: self._live is not None})
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> RenderableType:
        return swarm_table(
            self._rows, title=self.title, own_id=self.own_id, notes=tuple(self._notes), course=self.course
        )


class _LogFile(logging.Handler):
    """Appends records to a file of lines."""

    def __init__(self, path: Path, guard: WriteGuard) -> None:
        super().__init__()
        self._lines = LinesFile(path, MAX_LOG_BYTES, KEPT_LOGS, guard)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record).encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)


def setup_logging(
    log_path: Path | None, level: str, json_lines: bool, console: Console, guard: WriteGuard | None = None
) -> None:
    """Send the log to the console and, from level info down to `level`, to a file. Replaces earlier handlers.

    Args:
        log_path: appended to; None: no file.
        level: debug, info, warning or error: the least that the console shows. The file has info and above in any case.
        json_lines: JSON objects on the console instead of lines for people.
        console: shared with the live table. Neither place ever shows private keys or access tokens.
        guard: notes when one of the two cannot be written.
    """
    guard = guard or WriteGuard()
    threshold = getattr(logging, level.upper())
    handlers = [_console_handler(json_lines, console)]
    _tell_failures(handlers[0], guard)
    handlers[0].setLevel(threshold)
    handlers[0].addFilter(lambda record: not getattr(record, _ON_DISPLAY, False))
    if log_path is not None:
        file = _LogFile(log_path, guard)
        file.setFormatter(PlainLog(FILE_FORMAT))
        handlers.append(file)
    logging.basicConfig(level=min(threshold, logging.INFO), handlers=handlers, force=True)


def _tell_failures(handler: logging.Handler, guard: WriteGuard) -> None:
    """Give the guard what the handler cannot write, in place of a traceback for each record."""
    report_bug = handler.handleError

    def told(record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            guard.failed(CONSOLE, error)
        else:
            report_bug(record)

    handler.handleError = told  # type: ignore[method-assign]


def _console_handler(json_lines: bool, console: Console) -> logging.Handler:
    if json_lines or not console.is_terminal:
        stream = logging.StreamHandler(console.file)
        stream.setFormatter(JsonLog() if json_lines else PlainLog(CONSOLE_FORMAT))
        return stream
    rich_handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", markup=False)
    rich_handler.setFormatter(PlainLog("%(message)s"))
    return rich_handler


def _figure_columns(rows: Sequence[PeerRow]) -> list[tuple[str, str]]:
    """Header and total of each column of figures."""
    losses = [row.loss for row in rows if row.loss is not None and row.state != "killed"]
    return [
        ("round", str(max((row.round for row in rows), default=0))),
        ("group", ""),
        ("steps", human_count(sum(row.step for row in rows))),
        ("tokens/s", human_count(sum(row.tokens_per_s for row in rows))),
        ("loss", f"{sum(losses) / len(losses):.3f}" if losses else "-"),
        ("sent", human_bytes(sum(row.bytes_sent for row in rows))),
        ("received", human_bytes(sum(row.bytes_received for row in rows))),
        ("waited", f"{sum(row.seconds_waiting for row in rows):.0f} s"),
    ]


def _cells(row: PeerRow) -> dict[str, str]:
    """The figures of one row by column."""
    return {
        "round": str(row.round),
        "group": str(row.group_size) if row.group_size else "-",
        "steps": human_count(row.step),
        "tokens/s": human_count(row.tokens_per_s),
        "loss": f"{row.loss:.3f}" if row.loss is not None else "-",
        "sent": human_bytes(row.bytes_sent),
        "received": human_bytes(row.bytes_received),
        "waited": f"{row.seconds_waiting:.0f} s",
    }


def _summary(rows: Sequence[PeerRow]) -> str:
    figures = dict(_figure_columns(rows))
    return (
        f"{_peers(rows)}, round {figures['round']}, {figures['steps']} steps, {figures['tokens/s']} tokens/s, "
        f"loss {figures['loss']}, sent {figures['sent']}, received {figures['received']}"
    )


def _peers(rows: Sequence[PeerRow]) -> str:
    """`3 peers`, or `3 peers, 1 killed`."""
    killed = sum(row.state == "killed" for row in rows)
    alive = len(rows) - killed
    return ("1 peer" if alive == 1 else f"{alive} peers") + (f", {killed} killed" if killed else "")
