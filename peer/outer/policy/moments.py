"""Which moments of their inner optimizers peers average, and how often (DES-LOC, arXiv 2505.22549)."""

from __future__ import annotations

from dataclasses import dataclass

from peer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Desynced:
    """The first and the second moments, each every so many rounds: those that change slowly, less often.

    Attributes:
        first, second: rounds; 0 never.
    """

    first: int = 3
    second: int = 6

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 0 rounds", "published: 3 and 6")

    def due(self, round: int) -> tuple[bool, bool]:
        """Whether each is averaged in this round, counted from 1."""
        return self.first > 0 and round % self.first == 0, self.second > 0 and round % self.second == 0
