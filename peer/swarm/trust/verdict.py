"""What becomes of evidence: a verdict, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from peer.errors import ProtocolError


@dataclass(frozen=True)
class Verdict:
    """Whom evidence convicts, and of what, for a person."""

    culprit: str
    offence: str


class NoEvidenceError(ProtocolError):
    """It shows nobody's guilt."""


class RightError(NoEvidenceError):
    """The reducer did what it had to do."""


class ElsewhereError(NoEvidenceError):
    """It is about a round that is not in this peer's lineage: whether it shows something, others can say."""
