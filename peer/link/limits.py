"""When a peer has done its part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a peer is done: at the run's last round, or after its own number of committed rounds."""

    total_rounds: int | None
    max_rounds: int | None

    def reached(self, round: int, contributed: int) -> str | None:
        """Which limit a peer has reached at this round with so many contributions, in words; None: it goes on."""
        if self.total_rounds is not None and round >= self.total_rounds:
            return "the run is complete"
        if self.max_rounds is not None and contributed >= self.max_rounds:
            return f"made its {self.max_rounds} rounds (max_rounds); the run goes on without it"
        return None
