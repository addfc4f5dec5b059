"""What can be wrong with a source of text: for good, or for now."""

from __future__ import annotations

from peer.errors import AtollError


class FileProblem(AtollError):
    """A file cannot be read, or not any further; trying again would not help."""


class SourceBusy(AtollError):
    """A file cannot be read now; trying again later may help."""
