"""Counts what this peer trains: for its reports of progress, and for its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from peer.link.messages import Progress
from peer.system.clock import Clock

PROGRESS_PERIOD_S = 0.5


class StepReport(Protocol):
    """What the inner loop reports after a step."""

    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...


class TrainingTally:
    """Steps, tokens and seconds of one peer.

    Args:
        clock: monotonic seconds.

    Attributes:
        step, tokens: trained in all, by earlier processes too.
        steps_since_join: of this process.
        seconds_waiting: spent on the swarm instead of on steps.
        longest_wait_s: of these, the most between two steps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.step = 0
        self.tokens = 0
        self.steps_since_join = 0
        self.seconds_waiting = self.longest_wait_s = 0.0
        self._loss: float | None = None
        self._tokens_before = 0
        self._started = clock()
        self._last_report = float("-inf")

    def begin(self) -> None:
        """Training begins now."""
        self._started = self._clock()

    def resume(self, step: int, tokens: int) -> None:
        """Earlier processes have trained these."""
        self.step, self.tokens = step, tokens
        self._tokens_before = tokens

    def count(self, result: StepReport) -> None:
        """One step more."""
        self.step += 1
        self.steps_since_join += 1
        self.tokens += result.tokens
        self._loss = result.loss

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside is not spent on steps."""
        began = self._clock()
        yield
        waited_s = self._clock() - began
        self.seconds_waiting += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self._tokens_before) / self._elapsed

    def seconds_of(self, steps: int) -> float:
        """How long so many steps take, as far as this process has seen."""
        return steps * self._elapsed / max(1, self.steps_since_join)

    @property
    def _elapsed(self) -> float:
        return max(1e-9, self._clock() - self._started)

    def report_due(self) -> bool:
        """Whether a report is due; then the next one is a period later."""
        now = self._clock()
        due = now - self._last_report >= PROGRESS_PERIOD_S
        if due:
            self._last_report = now
        return due

    def report(self, unsent_tokens: int, due_in_s: float | None) -> Progress:
        """What the agent is to know of this peer's training."""
        finite = self._loss is not None and 0.0 <= self._loss < 1e6
        return Progress(
            step=self.step,
            tokens=self.tokens,
            tokens_per_s=self.tokens_per_s,
            loss=self._loss if finite else None,
            due_in_s=due_in_s,
            unsent_tokens=unsent_tokens,
            seconds_waiting=self.seconds_waiting,
        )
