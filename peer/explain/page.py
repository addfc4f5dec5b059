"""Told rounds on a terminal or in a file."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.text import Text

from peer.explain.names import Names
from peer.explain.words import Entry, tell

FILE_COLUMNS = 160
MIN_TEXT_COLUMNS = 40
STYLES = {"good": "green", "bad": "red", "quiet": "yellow", "news": "cyan"}
Local = Callable[[float], time.struct_time]


def page_console() -> Console:
    """As wide as the terminal; in a pipe or a file, wide enough for most lines."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_COLUMNS)


class Page:
    """Prints entries in order, with the date wherever it changes.

    Args:
        local: unix seconds -> the local time of day.
    """

    def __init__(self, console: Console, names: Names, local: Local = time.localtime) -> None:
        self._console, self._names, self._local = console, names, local
        self._date = ""

    def show(self, entries: Iterable[Entry]) -> None:
        """Print these after those that have been printed."""
        for entry in entries:
            self._show_date(entry)
            told = tell(entry, self._names)
            start = f"{self._time(entry, '%H:%M:%S'):8}  {f'round {told.round}':<9}  "
            self._fold(start, told.headline, STYLES[told.tone])
            for detail in told.details:
                self._fold(" " * len(start), detail, "dim")

    def line(self, text: str = "") -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _fold(self, start: str, text: str, style: str) -> None:
        """Text in a column of its own, so that a terminal of any width shows where the next round begins."""
        for line in textwrap.wrap(text, max(MIN_TEXT_COLUMNS, self._console.width - len(start))):
            self._console.print(Text.assemble(start, (line, style)), soft_wrap=True)
            start = " " * len(start)

    def _show_date(self, entry: Entry) -> None:
        date = self._time(entry, "%Y-%m-%d")
        if date not in ("", self._date):
            self._date = date
            self._console.print(Text(date, "bold"))

    def _time(self, entry: Entry, form: str) -> str:
        seconds = entry.records[0].ended_at
        return "" if seconds is None else time.strftime(form, self._local(seconds))
