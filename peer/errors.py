"""The one exception hierarchy of Atoll.

`UserError` is something a person can mend: the commands print it without a traceback and exit with code 2.
Everything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from peer.printable import printable

MAX_LINE_CHARS = 2000


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose."""


class UserError(AtollError):
    """A mistake or a condition outside the program that a person can mend.

    Args:
        what: one line: what is wrong, the offending value, the limit.
        hint: what to do about it; may span lines.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def render(self, program: str = "atoll") -> str:
        """The message as a person sees it on a terminal."""
        lines = [f"{program}: {printable(self.what, MAX_LINE_CHARS)}"]
        lines += [f"  {printable(line, MAX_LINE_CHARS)}" for line in self.hint.splitlines()]
        return "\n".join(lines)


class ProtocolError(AtollError):
    """Bytes from the network that do not obey the protocol; says what, the value and the limit, printable."""

    def __init__(self, what: str) -> None:
        super().__init__(printable(what))


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest known word, else the list of known words."""
    options = sorted(known)
    nearest = difflib.get_close_matches(unknown, options, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return "known: " + ", ".join(options)


def in_words(error: BaseException) -> str:
    """What an error says; of one that says nothing, such as a timeout of asyncio, its name."""
    silent = "no answer in time" if type(error).__name__ == "TimeoutError" else type(error).__name__
    return str(error) or silent
