"""When each fragment is sent and applied: pure functions of the inner step.

Steps count from 1: step t is over when t inner steps were made, and nothing is ever due at 0. Rounds of a fragment
count from 1 too, as in `RoundRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

from peer.errors import UserError
from peer.outer.policy.regular import Event, Regular, Schedule
from peer.outer.state.flat_layout import Cut
from peer.outer.state.fragments import Turn, whole

MOST_STEPS: Final = 2**24  # that a growing round reaches by itself, or that a timer waits


@dataclass(frozen=True, kw_only=True)
class Every(Regular):
    """A round of the one fragment 0 every H steps (DiLoCo, arXiv 2311.08105), with a growing H if asked for.

    H_r = min(max_steps, round(steps growth^(r // growth_every_rounds))), r = 0 for the first round after the warm
    start. The warm start syncs every `warm_start_every` steps up to and including `warm_start_steps`.

    Attributes:
        steps: H, or the first of the growing ones.
        overlap_steps: steps between sending and applying; H overlaps a whole round (arXiv 2502.12996).
        growth: factor; 1 keeps H.
        growth_every_rounds: rounds of the same H.
        max_steps: bound of H; None: 2^24.
        warm_start_steps: 0 for no warm start; a multiple of `warm_start_every`.
        warm_start_every: steps per round in the warm start.
    """

    steps: int
    overlap_steps: int = 0
    growth: float = 1.0
    growth_every_rounds: int = 1
    max_steps: int | None = None
    warm_start_steps: int = 0
    warm_start_every: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "growth_every_rounds", "warm_start_every"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("warm_start_steps", self.warm_start_steps, 0)
        if not (math.isfinite(self.growth) and self.growth >= 1.0):
            raise UserError(f"growth={self.growth}: must be finite and at least 1", "1 keeps the number of steps")
        if self.max_steps is not None and self.max_steps < self.steps:
            raise UserError(f"max_steps={self.max_steps}: must be at least steps={self.steps}", "leave it out")
        if self.warm_start_steps % self.warm_start_every:
            raise UserError(
                f"warm_start_steps={self.warm_start_steps}: must be a multiple of warm_start_every="
                f"{self.warm_start_every}",
                f"use {self.warm_start_steps // self.warm_start_every * self.warm_start_every}",
            )
        shortest = min(self.steps, self.warm_start_every) if self.warm_start_steps else self.steps
        if not 0 <= self.overlap_steps <= shortest:
            raise UserError(
                f"overlap_steps={self.overlap_steps}: must be in [0, {shortest}], the shortest round",
                "1 to 5 cost nothing measurable (arXiv 2501.18512)",
            )

    @property
    def steps_per_round(self) -> int:
        return self.steps

    @property
    def shortest(self) -> int:
        return min(self.length(1), self.steps)

    def longest(self, rounds: int | None) -> int:
        """See `Regular.longest`; of an endless run with endless growth, H."""
        if rounds is None:
            return self.steps if self.max_steps is None else max(self.steps, self.max_steps)
        grown = rounds - 1 - self.warm_start_steps // self.warm_start_every
        last = self.warm_start_every if grown < 0 else self._grown(grown // self.growth_every_rounds)
        return max(self.length(1), last)

    def begins(self, round: int) -> int:
        warm = self.warm_start_steps // self.warm_start_every
        if round - 1 <= warm:
            return (round - 1) * self.warm_start_every
        left, at = round - 1 - warm, self.warm_start_steps
        for length, rounds in self._levels():
            taken = int(min(rounds, left))
            at, left = at + taken * length, left - taken
            if left == 0:
                return at
        raise AssertionError("the last level never ends")

    def turn(self, round: int) -> Turn:
        return whole(round)

    def events(self, step: int) -> tuple[Event, ...]:
        round = self._round_at(step)
        return () if round is None else (_event(0, round, step, self.overlap_steps),)

    def in_words(self) -> str:
        growing = f", growing by {self.growth:g}" if self.growth > 1 else ""
        whole = self.steps > 1 and self.overlap_steps == self.steps
        return every(self.steps) + growing + (", applied a round later" if whole else _later(self.overlap_steps))

    def _round_at(self, step: int) -> int | None:
        """Number of the round that is sent at `step`, if one is."""
        if step <= self.warm_start_steps:
            return step // self.warm_start_every if step > 0 and step % self.warm_start_every == 0 else None
        done, at = self.warm_start_steps // self.warm_start_every, self.warm_start_steps
        for length, rounds in self._levels():
            passed = min(rounds, (step - at) // length)
            done, at = done + int(passed), at + int(passed) * length
            if at == step:
                return done
            if passed < rounds:
                return None
        raise AssertionError("the last level never ends")

    def _levels(self) -> Iterator[tuple[int, float]]:
        """(steps per round, number of such rounds), the last one endless unless H grows for ever."""
        for level in range(2**62):
            length = self._grown(level)
            final = self.growth == 1.0 or length >= self._longest
            yield length, math.inf if final else self.growth_every_rounds

    def _grown(self, level: int) -> int:
        """H after it has grown so many times."""
        if level * math.log(self.growth) > math.log(self._longest):  # the power may be beyond what a float holds
            return self._longest
        return min(round(self.steps * self.growth**level), self._longest)

    @property
    def _longest(self) -> int:
        return max(self.steps, MOST_STEPS) if self.max_steps is None else self.max_steps


@dataclass(frozen=True, kw_only=True)
class Strided(Regular):
    """Fragment p is sent at the steps t > 0 with t mod H = p H // F: each once per H (arXiv 2501.18512, algorithm 2).

    Attributes:
        period: H.
        num_fragments: F, at most H, so that no two fragments are sent at one step.
        overlap_steps: tau, steps between sending and applying; at most H.
        blocks_per_fragment: at most; larger models have more than `num_fragments`, smaller ones at most one a block.
        order, ends: see `Cut`.
    """

    period: int
    num_fragments: int = 1
    overlap_steps: int = 0
    blocks_per_fragment: int | None = None
    order: Literal["strided", "consecutive"] = "strided"
    ends: Literal["split", "apart"] = "split"

    def __post_init__(self) -> None:
        _check_at_least("period", self.period, 1)
        if not 1 <= self.num_fragments <= self.period:
            raise UserError(f"num_fragments={self.num_fragments}: must be in [1, period={self.period}]", "use fewer")
        if not 0 <= self.overlap_steps <= self.period:
            raise UserError(
                f"overlap_steps={self.overlap_steps}: must be in [0, period={self.period}]", "published: 1, up to 5"
            )
        if self.blocks_per_fragment is not None:
            _check_at_least("blocks_per_fragment", self.blocks_per_fragment, 1)
        if self.order not in ("strided", "consecutive"):
            raise UserError(f"order={self.order!r}: must be strided or consecutive", "published: strided")
        if self.ends not in ("split", "apart"):
            raise UserError(f"ends={self.ends!r}: must be split or apart", "apart: embeddings and head by themselves")

    @property
    def steps_per_round(self) -> int:
        return self.period

    @property
    def cut(self) -> Cut:  # type: ignore[override]
        return Cut(self.num_fragments, self.order, self.ends)

    def fitted(self, num_blocks: int) -> Self:
        """See `Schedule.fitted`: as numbers alone."""
        if self.blocks_per_fragment is None:
            return self
        least = max(1, min(self.num_fragments, num_blocks))
        count = max(least, -(-num_blocks // self.blocks_per_fragment)) + (self.ends == "apart")
        return replace(self, num_fragments=count, blocks_per_fragment=None)

    def offset(self, fragment: int) -> int:
        """t_p = p H // F."""
        return fragment * self.period // self.num_fragments

    def turn(self, round: int) -> Turn:
        """Fragment 1 comes first: fragment 0 would be due at step 0."""
        return Turn((round + 1) % self.num_fragments, round // self.num_fragments)

    def begins(self, round: int) -> int:
        return (round - 1) // self.num_fragments * self.period + self.offset((round - 1) % self.num_fragments)

    def longest(self, rounds: int | None) -> int:  # noqa: ARG002
        return self.period

    def events(self, step: int) -> tuple[Event, ...]:
        turns, phase = divmod(step, self.period)
        # The only p with p H // F = phase, if there is one, is the least with p H >= phase F.
        fragment = -(-phase * self.num_fragments // self.period)
        if step <= 0 or fragment >= self.num_fragments or self.offset(fragment) != phase:
            return ()
        return (_event(fragment, turns + (phase > 0), step, self.overlap_steps),)

    def in_words(self) -> str:
        return f"{self.num_fragments} fragments, each {every(self.period)}{_later(self.overlap_steps)}"


@dataclass(frozen=True, kw_only=True)
class Timer(Regular):
    """`rate` rounds per step on average, evenly spread: the clock of pair gossip (arXiv 2306.08289).

    The paper's clocks are Poisson processes; this one has their mean and no chance. Round k is sent at the first step
    t with floor(rate t) >= k, so a rate above 1 has several rounds at one step.

    Attributes:
        overlap_steps: steps between sending and applying, at most the shortest round.
    """

    rate: float = 1.0
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if not 1 / MOST_STEPS <= self.rate <= MOST_STEPS:
            limits = f"[1 / {MOST_STEPS}, {MOST_STEPS}] rounds per step"
            raise UserError(f"rate={self.rate}: must be in {limits}", "published: 1")
        if not 0 <= self.overlap_steps <= self.shortest:
            raise UserError(
                f"overlap_steps={self.overlap_steps}: must be in [0, {self.shortest}], the shortest round",
                "0 merges at once",
            )

    @property
    def steps_per_round(self) -> int:
        return max(1, round(1.0 / self.rate))

    @property
    def shortest(self) -> int:
        return math.floor(1.0 / self.rate)

    def longest(self, rounds: int | None) -> int:  # noqa: ARG002
        return math.ceil(1.0 / self.rate)

    def begins(self, round: int) -> int:
        step = math.ceil((round - 1) / self.rate)  # up to what division rounds
        return next(at for at in range(max(0, step - 1), step + 2) if math.floor(self.rate * at) >= round - 1)

    def turn(self, round: int) -> Turn:
        return whole(round)

    def events(self, step: int) -> tuple[Event, ...]:
        if step <= 0:
            return ()
        before, after = math.floor(self.rate * (step - 1)), math.floor(self.rate * step)
        return tuple(_event(0, round, step, self.overlap_steps) for round in range(before + 1, after + 1))

    def in_words(self) -> str:
        return f"{self.rate:g} times a step" + _later(self.overlap_steps)


@dataclass(frozen=True, kw_only=True)
class ChangeState:
    """Steps voted on so far, and the smoothed gradient norm n_t (None before the first)."""

    step: int = 0
    smoothed: float | None = None


@dataclass(frozen=True, kw_only=True)
class GradientChange(Schedule):
    """Sync when any peer's gradient norm changes: d = |n_t - n_{t-1}| / n_{t-1} >= delta (SelSync, arXiv 2307.07950).

    n_t is an exponential moving average of the norms with factor 2 / (smoothing + 1). The first `smoothing` steps vote
    for a round always. A peer's vote is private: the caller collects them, and one is enough.

    Attributes:
        delta: 0 syncs at every step, infinity in the warm-up only; published: 0.3.
        smoothing: steps.
    """

    delta: float = 0.3
    smoothing: int = 25

    def __post_init__(self) -> None:
        if not self.delta >= 0.0:
            raise UserError(f"delta={self.delta}: must be at least 0", "published: 0.3")
        _check_at_least("smoothing", self.smoothing, 1)

    def events(self, step: int) -> tuple[Event, ...]:
        """One after every step, which begins if a peer votes for it."""
        return (_event(0, step, step, 0),)

    def in_words(self) -> str:
        return f"when a gradient norm changes by {self.delta:.0%}"

    def vote(self, state: ChangeState, grad_norm: float) -> tuple[ChangeState, bool]:
        """The state after this step, and whether this peer wants a round.

        A norm that is not finite (an overflow, whose step is skipped) leaves n_t as it is: its d is 0.
        """
        before = state.smoothed
        after = before
        if math.isfinite(grad_norm):
            weight = 2.0 / (self.smoothing + 1)
            after = grad_norm if before is None else before + weight * (grad_norm - before)
        change = 0.0
        if before is not None and after is not None and after != before:
            change = abs(after - before) / before if before > 0.0 else math.inf
        wanted = state.step < self.smoothing or (change >= self.delta and self.delta < math.inf)
        return ChangeState(step=state.step + 1, smoothed=after), wanted


def _event(fragment: int, round: int, step: int, overlap_steps: int) -> Event:
    return Event(fragment=fragment, round=round, send_step=step, apply_step=step + overlap_steps)


def every(steps: int) -> str:
    """`every 500 steps`."""
    return "every step" if steps == 1 else f"every {steps} steps"


def _later(steps: int) -> str:
    return f", applied {steps} step{'s' if steps > 1 else ''} later" if steps else ""


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}={value}: must be at least {least}", "see the published recipe for a good number")
