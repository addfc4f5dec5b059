"""What schedules have in common, and those whose rounds begin by themselves: one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from peer.outer.state.flat_layout import WHOLE, Cut
from peer.outer.state.fragments import Turn


@dataclass(frozen=True, kw_only=True)
class Event:
    """One round of one fragment: its snapshot is sent after `send_step`, its result merged after `apply_step`.

    Attributes:
        moments: that it is of, see `Turn`.
    """

    fragment: int
    round: int
    send_step: int
    apply_step: int
    moments: int = 0


class Schedule(ABC):
    """Inner step -> rounds that begin there.

    Attributes:
        overlap_steps: steps between sending and applying.
        warm_start_steps: after which rounds have their usual length.
        num_fragments: that are synchronised by themselves.
        cut: how the model is cut into them.
    """

    overlap_steps: int = 0
    warm_start_steps: int = 0
    num_fragments: int = 1
    cut: Cut = WHOLE

    @property
    def steps_per_round(self) -> int:
        """H: inner steps in which everything is synchronised once."""
        return 1

    def fitted(self, num_blocks: int) -> Self:  # noqa: ARG002
        """The same for a model of so many blocks."""
        return self

    @abstractmethod
    def events(self, step: int) -> tuple[Event, ...]:
        """All rounds with `send_step == step`, in ascending order of fragment and round."""

    @abstractmethod
    def in_words(self) -> str:
        """`every 500 steps`, `3 fragments, each every 100 steps, applied 1 step later`."""


class Regular(Schedule):
    """Schedules whose rounds begin by themselves, one after the other: round number r of the run, counted from 1."""

    @abstractmethod
    def begins(self, round: int) -> int:
        """Inner steps that were made before round number `round` began, if no peer was late."""

    def within(self, steps: int) -> int:
        """Rounds that are sent in so many inner steps."""
        rounds = 0
        while self.begins(rounds + 2) <= steps:
            rounds += 1
        return rounds

    @abstractmethod
    def longest(self, rounds: int | None) -> int:
        """The most inner steps that any contribution to the first `rounds` rounds holds; None: of an endless run."""

    @abstractmethod
    def turn(self, round: int) -> Turn:
        """What the round is of that follows `round` rounds."""

    def event(self, number: int) -> Event:
        """Round number `number` of the run, counted from 1; `events` has it at its step."""
        turn, sent = self.turn(number - 1), self.begins(number + 1)
        return Event(
            fragment=turn.fragment, round=turn.rounds + 1, send_step=sent, apply_step=sent + self.overlap_steps,
            moments=turn.moments,
        )  # fmt: skip

    def length(self, round: int) -> int:
        """Inner steps of round number `round`, counted from 1."""
        return self.begins(round + 1) - self.begins(round)

    @property
    def shortest(self) -> int:
        """The fewest inner steps of any round."""
        return self.length(1)

    @property
    def spans_rounds(self) -> bool:
        """Whether a result is merged after the next fragment is sent."""
        return self.overlap_steps > self.shortest

    def overlapping(self, steps: int) -> Self:
        """The same, but a result is merged so many steps after it was sent."""
        return replace(self, overlap_steps=steps)  # type: ignore[type-var]

    def global_step(self, rounds: int, steps_in_round: int) -> float:
        """The run's progress in inner steps of one peer after `rounds` rounds: what learning-rate schedules follow.

        A joiner gets the swarm's rate from the round number, and a peer that waits for a late round does not run
        ahead of the others: no more of its steps count than the round has.
        """
        return float(self.begins(rounds + 1) + min(steps_in_round, self.length(rounds + 1)))
