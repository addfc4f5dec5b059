"""Which moments of their inner optimizers peers average, and how often (DES-LOC, arXiv 2505.22549)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.errors import UserError
from peer.outer.optim.optimizers import Vectors, Wrapper
from peer.outer.policy.regular import Event, Regular
from peer.outer.state.fragments import Turn


@dataclass(frozen=True, kw_only=True)
class Desynced:
    """The first and the second moments, each every so many rounds: those that change slowly, less often.

    Attributes:
        first, second: rounds; 0 never.
    """

    first: int = 3
    second: int = 6

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 0 rounds", "published: 3 and 6")

    def due(self, round: int) -> tuple[bool, bool]:
        """Whether each is averaged in this round, counted from 1."""
        return self.first > 0 and round % self.first == 0, self.second > 0 and round % self.second == 0

    def links(self, rounds: int) -> int:
        """Links of a chain that so many rounds make: one each, and one for every mean of moments."""
        return rounds + sum(rounds // every for every in (self.first, self.second) if every)

    def turn(self, links: int) -> Turn:
        """What the link is of that follows so many: a round's parameters, then the moments that are due after it."""
        round = self._round(links)
        kinds = [0, *(kind for kind, is_due in enumerate(self.due(round), 1) if is_due)]
        kind = kinds[links - self.links(round - 1)]
        had = round if kind == 0 else round // (self.first, self.second)[kind - 1]
        return Turn(0, had - 1, kind)

    def rounds(self, links: int) -> int:
        """How many of so many links are of parameters."""
        round = self._round(links)
        return round - (links == self.links(round - 1))

    def _round(self, links: int) -> int:
        """The round, counted from 1, to which the link belongs that follows so many."""
        round = int(links / (1.0 + sum(1.0 / every for every in (self.first, self.second) if every)))
        while self.links(round) <= links:  # at most three times
            round += 1
        return round


@dataclass(frozen=True, kw_only=True)
class WithMoments(Regular):
    """Another schedule, whose rounds are followed by those of moments, without a step between them."""

    base: Regular
    moments: Desynced

    @property
    def steps_per_round(self) -> int:
        return self.base.steps_per_round

    @property
    def shortest(self) -> int:
        """Of those that have steps."""
        return self.base.shortest

    def longest(self, rounds: int | None) -> int:
        return self.base.longest(rounds)

    def turn(self, round: int) -> Turn:
        return self.moments.turn(round)

    def begins(self, round: int) -> int:
        turn = self.turn(round - 1)
        every = (1, self.moments.first, self.moments.second)[turn.moments]
        return self.base.begins((turn.rounds + 1) * every + (turn.moments > 0))

    def events(self, step: int) -> tuple[Event, ...]:
        return tuple(
            Event(fragment=0, round=round // every, send_step=step, apply_step=step, moments=kind)
            for round in [event.round for event in self.base.events(step)]
            for kind, every in enumerate((1, self.moments.first, self.moments.second))
            if kind == 0 or self.moments.due(round)[kind - 1]
        )

    def in_words(self) -> str:
        return self.base.in_words()


@dataclass(frozen=True, kw_only=True)
class BesideMoments(Wrapper):
    """Another optimizer, and two buffers that rounds of their own move: the means of first and second moments.

    Attributes:
        moments: how often these rounds are.
    """

    moments: Desynced

    @property
    def initial_values(self) -> tuple[float, ...]:
        """Those of the base, and moments of zero, with which inner optimizers begin."""
        return (*self.base.initial_values, 0.0, 0.0)

    def step(
        self, old: Vectors, aggregate: Tensor, new: Vectors, *, round: int = 0, lr_scale: float = 1.0, start: int = 0
    ) -> None:
        before, after = Vectors(old.anchor, old.buffers[:-2]), Vectors(new.anchor, new.buffers[:-2])
        self.base.step(before, aggregate, after, round=round, lr_scale=lr_scale, start=start)
        for mean, kept in zip(old.buffers[-2:], new.buffers[-2:], strict=True):
            kept.copy_(mean)

    def result(self, anchor: Tensor, buffers: Sequence[Tensor], rounds: int) -> Tensor:
        """See `OuterOptimizer.result`; of so many rounds, some were of moments."""
        return self.base.result(anchor, buffers[:-2], self.moments.rounds(rounds))
