"""When a round is due, and how far training has come in the run's own steps."""

from __future__ import annotations

from dataclasses import dataclass

from peer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EverySteps:
    """A round every `steps_per_round` inner steps (H of DiLoCo, arXiv 2311.08105)."""

    steps_per_round: int

    def __post_init__(self) -> None:
        if self.steps_per_round < 1:
            raise UserError(f"steps_per_round={self.steps_per_round}: must be at least 1")

    def due(self, steps_since_snapshot: int) -> bool:
        """Whether a round is due after this many inner steps since the last snapshot."""
        return steps_since_snapshot >= self.steps_per_round

    def global_step(self, round: int, steps_in_round: int) -> float:
        """The run's progress in inner steps of one peer: what learning-rate schedules follow.

        A joiner gets the swarm's rate from the round number, and a peer that waits for a late round does not run
        ahead of the others: at most `steps_per_round` of its steps in a round count.
        """
        return float(round * self.steps_per_round + min(steps_in_round, self.steps_per_round))
