"""Words that others chose, before they reach a terminal, a log, a page or a file name."""

from __future__ import annotations

import sys
import unicodedata

MAX_CHARS = 400
_SPACES = frozenset("\n\r\t\v\f")
_KEPT = frozenset("\n\t\u200c\u200d")  # the last two join letters and emoji


def printable(text: str, max_chars: int = MAX_CHARS) -> str:
    """The text on one line, of bounded length, without anything that a terminal or an editor would obey.

    Line ends and tabs become spaces; control characters, escape sequences, marks that turn the direction of writing,
    surrogates and unassigned characters become `?`.
    """
    shown = text if len(text) <= max_chars else f"{text[:max_chars]}..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else " " if c in _SPACES else "?" for c in shown)


def printable_lines(text: str, max_chars: int = MAX_CHARS) -> str:
    """The same line by line, for texts of our own, such as tracebacks, that have several."""
    return "\n".join(printable(line, max_chars) for line in text.split("\n"))


def say(piece: str) -> None:
    """Print a piece of what a model writes; on a terminal without anything that this would obey."""
    if sys.stdout.isatty():
        piece = "".join(c if c in _KEPT or unicodedata.category(c) == "Zs" else printable(c) for c in piece)
    print(piece, end="", flush=True)
