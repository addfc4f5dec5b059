"""`LockstepSync`: recipes in which the outer optimizer makes every step, on the gradients of all peers (DeMo).

A peer hands over the gradient of its batch, and waits for the anchor that it leads to: the next gradient must be taken
there. A gradient that came too late for its round belongs to parameters that nobody has any more, and is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from peer.link.messages import Anchor, Merged, Snapshot, WantSnapshot
from peer.link.supervisor import AgentGoneError
from peer.link.sync import StepResult, SwarmSync

log = logging.getLogger(__name__)
WAIT_S = 0.2  # between looks whether this peer is asked to stop


class LockstepSync(SwarmSync):
    """Implements the `Sync` of `peer.train.loop` where the swarm makes every step together.

    Args:
        gradient: writes the gradient of the last batch, scaled by its rate, into fp32 [P].
        stopping: this peer is asked to stop; then it waits for nobody.
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
        self._anchors = self._anchors_seen = 0
        self.dropped = 0

    def after_step(self, result: StepResult) -> None:
        """Count the step, hand over its gradient, wait for the anchor."""
        self._count(result)
        began = self._clock()
        self._attend(0.0)
        if self._anchors == self._anchors_seen:
            self._gradient(self.memory.snapshot)
            self._attend(0.0, self._hand_over)
            while self._anchors == self._anchors_seen and not self._stopping():
                self._attend(WAIT_S)
        else:
            self._drop()
        self._anchors_seen = self._anchors
        self.seconds_waiting += self._clock() - began

    def _attend(self, timeout_s: float, then: Callable[[], None] = lambda: None) -> None:
        """Handle what has come, and show how far this peer is; without an agent, see to another one."""
        try:
            self.poll(timeout_s)
            then()
            self._show_progress()
        except AgentGoneError as gone:
            self._revive(gone)
            if not self.agent.running:
                self._pause(WAIT_S)

    def _wanted(self, message: WantSnapshot) -> None:
        """The round of this gradient has failed, and others go on with it: the same once more."""
        if self._outstanding is not None and self._outstanding == message.after:
            self._hand_over()

    def _hand_over(self) -> None:
        self._sequence += 1
        self._outstanding = self._sequence
        unsent = max(1, self.tokens - self._tokens_in_base)
        self.agent.send(Snapshot(sequence=self._sequence, tokens=unsent))

    def _drop(self) -> None:
        self.dropped += 1
        log.info("the gradient of step %d came too late for its round", self.step)
        self._settle()

    def _settle(self) -> None:
        """Nothing of the steps so far will be sent any more."""
        self.steps_since_snapshot = 0
        self._tokens_in_base = self.tokens

    def _merge(self, message: Anchor) -> None:
        contributed = message.contributed is not None and message.contributed == self._outstanding
        self.replica.write(self.memory.anchor)
        self._keep_anchor(message.round)
        if contributed:
            self.rounds_contributed += 1
            self._settle()
        elif self._outstanding is not None:
            self._drop()
        self._outstanding = None
        self._anchors += 1
        self.agent.send(Merged(round=message.round))
        self._on_message(message)
