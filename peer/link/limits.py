"""When a peer has done its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

COMPLETE = "the run is complete"
ENDED = "the organiser has ended the run"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a peer is done: at the run's last round or token, when its organiser
    ends it, or after its own number of committed rounds.

    Attributes:
        stopping: whether this peer was asked to stop; then it waits for nothing.
    """

    rounds_total: int | None
    tokens_total: int | None = None
    max_rounds: int | None
    ended: str = ""  # why, whatever the others are
    stopping: Callable[[], bool] = lambda: False

    def reached(self, round: int, contributed: int, swarm_tokens: int = 0) -> str | None:
        """Which limit a peer has reached, in words; None: it continues.

        Args:
            round: of its anchor.
            contributed: rounds that hold a contribution of it.
            swarm_tokens: that went into its anchor, of all peers.
        """
        if self.ended:
            return self.ended
        if self.rounds_total is not None and round >= self.rounds_total:
            return COMPLETE
        if self.tokens_total is not None and swarm_tokens >= self.tokens_total:
            return COMPLETE
        if self.max_rounds is not None and contributed >= self.max_rounds:
            return f"made its {self.max_rounds} rounds (max_rounds); the run continues without it"
        return None
