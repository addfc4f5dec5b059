"""`SwarmSync`: the training loop's view of the swarm. Hands over snapshots, merges anchors, never blocks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from peer.link.memory import SharedState
from peer.link.messages import (
    Anchor,
    Fatal,
    LivePeers,
    Mapped,
    Merged,
    Message,
    Progress,
    Published,
    Snapshot,
    Start,
    WantSnapshot,
)
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.outer.optim.optimizers import OuterOptimizer
from peer.outer.policy.schedules import Every
from peer.outer.state.carry import carry_progress_

log = logging.getLogger(__name__)
PROGRESS_PERIOD_S = 0.5


class LocalParameters(Protocol):
    """The local parameters, as one flat fp32 vector on the CPU."""

    def read(self, out: Tensor) -> None: ...
    def write(self, flat: Tensor) -> None: ...


class StepReport(Protocol):
    """What the inner loop reports after a step."""

    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a peer is done: at the run's last round, or after its own number of committed rounds."""

    total_rounds: int | None
    max_rounds: int | None


class SwarmSync:
    """Implements the `Sync` of `peer.train.loop` over an agent process.

    Args:
        agent: the running agent, past `Published`.
        start, mapped: messages to repeat to a restarted agent.
        memory: the shared state.
        replica: reads and writes the model's parameters.
        schedule: when a round is due.
        optimizer: says what the run yields: the anchor, or an average of anchors.
        limits: when training ends.
        on_message: called with every message that the trainer's side wants to see (rounds, swarm, saved).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        agent: AgentProcess,
        start: Start,
        mapped: Mapped,
        memory: SharedState,
        replica: LocalParameters,
        schedule: Every,
        optimizer: OuterOptimizer,
        limits: Limits,
        on_message: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.agent, self._start, self._mapped = agent, start, mapped
        self.memory, self.replica, self.schedule, self.limits = memory, replica, schedule, limits
        self._optimizer = optimizer
        self._on_message, self._clock = on_message, clock
        self.round = 0
        self.rounds_contributed = 0
        self.steps_since_snapshot = 0
        self.steps_since_join = 0
        self.step = 0
        self.tokens = 0
        self.seconds_waiting = 0.0
        self._base = torch.empty_like(memory.anchor)
        self._result: Tensor | None = None
        self._scratch = torch.empty_like(memory.anchor)
        self._sequence = 0
        self._outstanding: int | None = None
        self._armed = True
        self._tokens_in_base = 0
        self._tokens_at_snapshot = 0
        self._steps_at_snapshot = 0
        self._tokens_before = 0
        self._resumed = False
        self._known_addresses: tuple[str, ...] = ()
        self._last_progress = float("-inf")
        self._started = clock()
        self._loss: float | None = None

    def begin(self, anchor: Anchor) -> None:
        """Take the first anchor of this process: as the local parameters, or after `resume` under the resumed ones."""
        self._started = self._clock()
        if self._resumed:
            self._merge(anchor)
            return
        self.replica.write(self.memory.anchor)
        self._keep_anchor(anchor.round)
        self.agent.send(Merged(round=anchor.round))

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from `progress()` of an earlier process. The shared anchor must be the resumed one, the replica the
        resumed parameters, and no agent may have changed the anchor yet.
        """
        self._keep_anchor(progress["round"])
        self.step, self.tokens = progress["step"], progress["tokens"]
        self.steps_since_snapshot = progress["steps_since_snapshot"]
        self._tokens_in_base = self.tokens - progress["unsent_tokens"]
        self._tokens_before = self.tokens
        self._resumed = True

    def progress(self) -> dict[str, Any]:
        """What a checkpoint must remember of this object."""
        return {
            "round": self.round,
            "step": self.step,
            "tokens": self.tokens,
            "steps_since_snapshot": self.steps_since_snapshot,
            "unsent_tokens": self.tokens - self._tokens_in_base,
        }

    @property
    def anchor(self) -> Tensor:
        """The anchor of `round`, fp32 [P]; a copy of this process that stays as it is until the next merge."""
        return self._base

    @property
    def result(self) -> Tensor:
        """What the run yields at `round`, fp32 [P]: to evaluate and to export. Usually the anchor."""
        return self._base if self._result is None else self._result

    @property
    def finished(self) -> bool:
        total, own = self.limits.total_rounds, self.limits.max_rounds
        return (total is not None and self.round >= total) or (own is not None and self.rounds_contributed >= own)

    @property
    def global_step(self) -> float:
        """The swarm's progress in nominal steps, for learning-rate schedules."""
        return self.schedule.global_step(self.round, self.steps_since_snapshot)

    @property
    def _due(self) -> bool:
        """Enough has been trained for a round."""
        return self.steps_since_snapshot >= self._steps_of_round

    @property
    def _due_in_s(self) -> float | None:
        """Seconds until it has; None where others may call for a round at any step."""
        elapsed = max(1e-9, self._clock() - self._started)
        return max(0, self._steps_of_round - self.steps_since_snapshot) * elapsed / max(1, self.steps_since_join)

    @property
    def _steps_of_round(self) -> int:
        return self.schedule.length(self.round + 1)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self._tokens_before) / max(1e-9, self._clock() - self._started)

    def after_step(self, result: StepReport) -> None:
        """Count the step, merge what has come, hand over what is due."""
        self._count(result)
        began = self._clock()
        try:
            self.poll()
            if self._armed and self._outstanding is None and self._due:
                self._hand_over()
            self._show_progress()
        except AgentGoneError as gone:
            self._revive(gone)
        self.seconds_waiting += self._clock() - began

    def _count(self, result: StepReport) -> None:
        self.step += 1
        self.steps_since_snapshot += 1
        self.steps_since_join += 1
        self.tokens += result.tokens
        self._loss = result.loss

    def _show_progress(self) -> None:
        now = self._clock()
        if now - self._last_progress >= PROGRESS_PERIOD_S:
            self._last_progress = now
            self.agent.send(self._report())

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle every message that has arrived, after waiting at most `timeout_s` for the first."""
        while (message := self.agent.receive(timeout_s)) is not None:
            timeout_s = 0.0
            if isinstance(message, Anchor):
                self._merge(message)
            elif isinstance(message, WantSnapshot):
                self._wanted(message)
            elif isinstance(message, Fatal):
                log.error("agent: %s %s", message.what, message.hint)
            elif isinstance(message, Published):
                self.agent.send(self._mapped)
            else:
                if isinstance(message, LivePeers) and message.addresses:
                    self._known_addresses = message.addresses
                self._on_message(message)

    def _wanted(self, message: WantSnapshot) -> None:
        if self._outstanding in (None, message.after):
            self._hand_over()

    def _hand_over(self) -> None:
        self.replica.read(self.memory.snapshot)
        self._sequence += 1
        self._outstanding = self._sequence
        self._armed = False
        self._tokens_at_snapshot = self.tokens
        self._steps_at_snapshot = self.steps_since_snapshot
        unsent = max(1, self.tokens - self._tokens_in_base)
        self.agent.send(Snapshot(sequence=self._sequence, tokens=unsent))

    def _merge(self, message: Anchor) -> None:
        """local <- anchor + (local - base): keeps every step that the new anchor does not hold yet."""
        contributed = message.contributed is not None and message.contributed == self._outstanding
        base = self.memory.snapshot if contributed else self._base
        self.replica.read(self._scratch)
        carry_progress_(self._scratch, base, self.memory.anchor)
        self.replica.write(self._scratch)
        self._keep_anchor(message.round)
        if contributed:
            self.rounds_contributed += 1
            self.steps_since_snapshot -= self._steps_at_snapshot
            self._tokens_in_base = self._tokens_at_snapshot
        self._outstanding = None
        self._armed = True
        self.agent.send(Merged(round=message.round))
        self._on_message(message)

    def _keep_anchor(self, round: int) -> None:
        """Copy what the agent may change again as soon as it hears that this process has merged."""
        self.round = round
        self._base.copy_(self.memory.anchor)
        result = self._optimizer.result(self.memory.anchor, self.memory.buffers, round)
        self._result = None if result is self.memory.anchor else result

    def _report(self) -> Progress:
        finite = self._loss is not None and 0.0 <= self._loss < 1e6
        return Progress(
            step=self.step,
            tokens=self.tokens,
            tokens_per_s=self.tokens_per_s,
            loss=self._loss if finite else None,
            due_in_s=self._due_in_s,
            unsent_tokens=self.tokens - self._tokens_in_base,
            seconds_waiting=self.seconds_waiting,
        )

    def _revive(self, gone: AgentGoneError) -> None:
        """Train on without an agent; start the next one when the back-off allows.

        The outstanding snapshot stays known: if the old agent committed it before it died, the next one says so.
        """
        self._armed = False
        if self.agent.running:
            log.warning("agent: %s; ending it", gone)
            self.agent.end(0.0)
        if not self.agent.may_restart:
            return
        log.warning("agent ended (%s); restarting it, training continues", gone)
        self.agent.start()
        initial_peers = dict.fromkeys((*self._start.initial_peers, *self._known_addresses))
        again = self._start.model_copy(update={"initial_peers": tuple(initial_peers), "restarted": True})
        with contextlib.suppress(AgentGoneError):  # gone again already: the next step sees it
            self.agent.send(again)
