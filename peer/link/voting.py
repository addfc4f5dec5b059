"""`VotingSync`: recipes in which any peer calls for a round, when the norm of its gradient changes (SelSync).

The paper's workers step together and send each other a bit at every step. Here no peer waits: a peer that votes
contributes its progress, its join tells the group, and every other member contributes at its next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from peer.link.messages import Anchor, WantSnapshot
from peer.link.sync import SwarmSync
from peer.link.tally import StepReport
from peer.outer.policy.schedules import ChangeState, Every, GradientChange


class VotingSync(SwarmSync):
    """Implements the `Sync` of `peer.train.loop` where rounds are called for.

    Args:
        others: those of `SwarmSync`, but for the schedule.
    """

    def __init__(self, votes: GradientChange, **others: Any) -> None:
        super().__init__(schedule=Every(steps=1), **others)  # a round may begin after every step
        self._votes, self._state = votes, ChangeState()
        self._voted = self._called = self._calls = False

    def begin(self, anchor: Anchor) -> None:
        """See `SwarmSync.begin`. Rounds of before count for the warm-up: a newcomer does not call for another one."""
        if not self._resumed:
            self._state = ChangeState(step=min(anchor.round, self._votes.smoothing))
        super().begin(anchor)

    def resume(self, progress: Mapping[str, Any], tensors: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        super().resume(progress, tensors)
        self._state = ChangeState(step=progress["votes"], smoothed=progress["smoothed_norm"])
        self._voted = progress["calls"]

    def progress(self) -> dict[str, Any]:
        votes = {"votes": self._state.step, "smoothed_norm": self._state.smoothed, "calls": self._voted or self._calls}
        return {**super().progress(), **votes}

    @property
    def global_step(self) -> float:
        """This peer's own steps: the number of steps in a round is unknown."""
        return float(self.step)

    @property
    def _due(self) -> bool:
        return self._voted or self._called

    @property
    def _due_in_s(self) -> float | None:
        return None

    def _count(self, result: StepReport) -> None:
        super()._count(result)
        self._state, wanted = self._votes.vote(self._state, result.grad_norm)
        self._voted = self._voted or wanted

    def _wanted(self, message: WantSnapshot) -> None:
        """Another peer has called, or the round of the last contribution has failed."""
        if self._ledger.outstanding is None and not self.steps_since_snapshot:
            self._called = True  # nothing has been trained yet: after the next step
        else:
            super()._wanted(message)

    def _hand_over(self) -> None:
        self._calls = self._calls or self._voted
        self._voted = self._called = False
        super()._hand_over()

    def _merge(self, message: Anchor) -> None:
        if self._ledger.outstanding is not None and message.contributed != self._ledger.outstanding:
            self._voted = self._voted or self._calls  # others made a round without this peer: it calls again
        self._calls = False
        super()._merge(message)
