"""`LockstepSync`: recipes in which the outer optimizer makes every step, on the gradients of all peers (ddp, DeMo).

A peer hands over the gradient of its batch, and waits for the anchor that it leads to: the next gradient must be taken
there. With one step of overlap (DisTrO) it computes the next one meanwhile, and waits before it hands that over. A
gradient that is late for its round belongs to parameters that no longer exist, and is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from peer.link.messages import Anchor, WantSnapshot
from peer.link.supervisor import AgentGoneError
from peer.link.sync import SwarmSync
from peer.link.tally import StepReport

log = logging.getLogger(__name__)
WAIT_S = 0.2  # between looks whether this peer is asked to stop


class Gradient(Protocol):
    """The gradient of the last batch; a `KeptGradient` implements it."""

    def take(self, out: Tensor) -> None:
        """Write it into fp32 [P]."""


class LockstepSync(SwarmSync):
    """Implements the `Sync` of `peer.train.loop` where the swarm makes every step together.

    Args:
        gradient: of the last batch.
        pause: seconds -> waits; while there is no agent.
        others: those of `SwarmSync`.

    Attributes:
        dropped: gradients that came too late.
    """

    def __init__(
        self, gradient: Gradient, *, pause: Callable[[float], None] = time.sleep, **others: Any
    ) -> None:
        super().__init__(**others)
        self._gradient, self._pause = gradient, pause
        self._overlap = self.schedule.overlap_steps
        self._taken_at = 0
        self.dropped = 0

    def begin(self, anchor: Anchor) -> None:
        super().begin(anchor)
        self._ledger.settle(self.steps_since_snapshot, self.tokens)  # a gradient of before a resume is gone
        self._taken_at = self.round

    def after_step(self, result: StepReport) -> None:
        """Count the step, hand over its gradient, wait for the anchor."""
        self._count(result)
        with self._tally.waiting():
            self._attend(0.0)
            self._await_anchor()
            if not (self.finished or self._waits):  # else the run is over, or this peer is asked to stop
                self._offer()
            self._taken_at = self.round
        self._rest()

    def _offer(self) -> None:
        """Hand over the gradient, if the anchor that it was taken at is not too old."""
        if not 0 <= self.round - self._taken_at <= self._overlap:
            self._gradient.take(self._local.scratch)  # or a step that is skipped would hand it over
            self._drop()
            self._ledger.used.drop(marked=True)
            self._ledger.settle(self.steps_since_snapshot, self.tokens)
            return
        self._gradient.take(self.memory.snapshot)
        try:
            self._hand_over()
        except AgentGoneError as gone:
            self._replace(gone)
        if not self._overlap:
            self._await_anchor()

    @property
    def rounds_before(self) -> int:
        """Rounds before that of the next gradient: those applied, and with overlap the one that is under way."""
        return self.round + (self._ledger.outstanding is not None)

    @property
    def _waits(self) -> bool:
        """A gradient was handed over and has led to nothing yet; or there is an agent that has no anchor yet."""
        return self._ledger.outstanding is not None or not self._ledger.armed

    def _await_anchor(self) -> None:
        while self._waits and not (self.finished or self.limits.stopping()):
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
        if self._ledger.outstanding is not None and self._ledger.outstanding == message.after:
            self.agent.send(self._ledger.hand_over())

    @property
    def _sent_parameters(self) -> int | None:
        return None  # a gradient

    def _hand_over(self) -> None:
        self._ledger.mark(self.tokens)
        self.agent.send(self._ledger.hand_over())

    def _drop(self) -> None:
        self.dropped += 1
        log.info("a gradient came too late for its round: %d of %d steps so far", self.dropped, self.step)

    def _merge(self, message: Anchor) -> None:
        contributed = self._ledger.is_in(message)
        self._local.take(message.round)
        if self._ledger.outstanding is not None:
            if not contributed:
                self._ledger.used.drop(marked=True)
            self._ledger.settle_marked()
            self.rounds_contributed += contributed
            if not contributed:
                self._drop()
        self._tell_merged(message)
