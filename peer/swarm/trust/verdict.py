"""The outcome of judging evidence: a verdict, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from peer.errors import ProtocolError


@dataclass(frozen=True)
class Verdict:
    """The offender that evidence convicts, and the offence in words."""

    culprit: str
    offence: str


class NoEvidenceError(ProtocolError):
    """It proves no offence."""


class RightError(NoEvidenceError):
    """The reduction is correct."""


class ElsewhereError(NoEvidenceError):
    """It is about a round that is not in this peer's lineage: only peers on that lineage can judge it."""
