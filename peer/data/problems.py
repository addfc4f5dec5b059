"""What can be wrong with a source of text: for good, or for now."""

from __future__ import annotations

from peer.errors import AtollError
from peer.printable import printable


class _Explained(AtollError):
    """Says what may be a server's or a file's own words."""

    def __init__(self, what: str) -> None:
        super().__init__(printable(what))


class FileProblem(_Explained):
    """A file cannot be read, or not any further; trying again would not help."""


class SourceBusy(_Explained):
    """A file cannot be read now; trying again later may help."""
