"""`LockstepSync`: recipes in which the outer optimizer makes every step, on the gradients of all peers (DeMo).

A peer hands over the gradient of its batch, and waits for the anchor that it leads to: the next gradient must be taken
there. With one step of overlap (DisTrO) it computes the next one meanwhile, and waits before it hands that over. A
gradient that is late for its round belongs to parameters that no longer exist, and is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from peer.link.messages import Anchor, Merged, Snapshot, WantSnapshot
from peer.link.supervisor import AgentGoneError
from peer.link.sync import StepReport, SwarmSync

log = logging.getLogger(__name__)
WAIT_S = 0.2  # between looks whether this peer is asked to stop


class LockstepSync(SwarmSync):
    """Implements the `Sync` of `peer.train.loop` where the swarm makes every step together.

    Args:
        gradient: writes the gradient of the last batch, scaled by its rate, into fp32 [P].
        stopping: this peer was asked to stop; then it does not wait for others.
        pause: seconds -> waits; while there is no agent.
        others: those of `SwarmSync`.

    Attributes:
        dropped: gradients that came too late.
    """

    def __init__(
        self, gradient: Callable[[Tensor], None], stopping: Callable[[], bool], *,
        pause: Callable[[float], None] = time.sleep, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(**others)
        self._gradient, self._stopping, self._pause = gradient, stopping, pause
        self._overlap = self.schedule.overlap_steps
        self._taken_at = 0
        self.dropped = 0

    def begin(self, anchor: Anchor) -> None:
        """See `SwarmSync.begin`."""
        super().begin(anchor)
        self._settle(self.steps_since_snapshot, self.tokens)  # a gradient of before a resume is gone
        self._taken_at = self.round

    def after_step(self, result: StepReport) -> None:
        """Count the step, hand over its gradient, wait for the anchor."""
        self._count(result)
        began = self._clock()
        self._attend(0.0)
        self._await_anchor()
        if not (self.finished or self._waits):  # else the run is over, or this peer is asked to stop
            self._offer()
        self._taken_at = self.round
        self.seconds_waiting += self._clock() - began

    def _offer(self) -> None:
        """Hand over the gradient, if the anchor that it was taken at is not too old."""
        if not 0 <= self.round - self._taken_at <= self._overlap:
            self._gradient(self._scratch)  # or a step that is skipped would hand it over
            self._drop()
            self._settle(self.steps_since_snapshot, self.tokens)
            return
        self._gradient(self.memory.snapshot)
        try:
            self._hand_over()
        except AgentGoneError as gone:
            self._replace(gone)
        if not self._overlap:
            self._await_anchor()

    @property
    def _waits(self) -> bool:
        """A gradient was handed over and has led to nothing yet; or there is an agent that has no anchor yet."""
        return self._outstanding is not None or not self._armed

    def _await_anchor(self) -> None:
        while self._waits and not (self.finished or self._stopping()):
            self._attend(WAIT_S)

    def _attend(self, timeout_s: float) -> None:
        """Handle what has come, and show how far this peer is; without an agent, see to another one."""
        try:
            self.poll(timeout_s)
            self._show_progress()
        except AgentGoneError as gone:
            self._replace(gone)

    def _replace(self, gone: AgentGoneError) -> None:
        self._revive(gone)
        if not self.agent.running:
            self._pause(WAIT_S)

    def _wanted(self, message: WantSnapshot) -> None:
        """The round of this gradient failed, and other members retry it: send the same gradient again."""
        if self._outstanding is not None and self._outstanding == message.after:
            self._tell()

    def _hand_over(self) -> None:
        self._tokens_at_snapshot, self._steps_at_snapshot = self.tokens, self.steps_since_snapshot
        self._tell()

    def _tell(self) -> None:
        self._sequence += 1
        self._outstanding = self._sequence
        unsent = max(1, self._tokens_at_snapshot - self._tokens_in_base)
        self.agent.send(Snapshot(sequence=self._sequence, tokens=unsent))

    def _drop(self) -> None:
        self.dropped += 1
        log.info("a gradient came too late for its round: %d of %d steps so far", self.dropped, self.step)

    def _settle(self, steps: int, tokens: int) -> None:
        """Nothing of so many steps since the last anchor, and of all tokens up to these, will be sent any more."""
        self.steps_since_snapshot -= steps
        self._tokens_in_base = tokens

    def _merge(self, message: Anchor) -> None:
        contributed = message.contributed is not None and message.contributed == self._outstanding
        self.replica.write(self.memory.anchor)
        self._keep_anchor(message.round)
        if self._outstanding is not None:
            self._settle(self._steps_at_snapshot, self._tokens_at_snapshot)
            self.rounds_contributed += contributed
            if not contributed:
                self._drop()
        self._outstanding = None
        self._armed = True
        self.agent.send(Merged(round=message.round))
        self._on_message(message)
