"""Writes this peer's speed and bandwidth into its joins, and divides a group's work by the joins of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

from peer.outer.policy.claims import Claim, level_of, rate_of
from peer.outer.policy.work_allocation import Allotment
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.fragments import Fragments
from peer.protocol.wire import JoinMessage


class Allotter:
    """The work of one run's members, by the joins that all of them hold.

    Args:
        tokens_per_s: what this peer trains.
        up_bytes_s: what a person has limited its line to; 0: to nothing.
    """

    def __init__(
        self, recipe: Recipe, fragments: Fragments, own_id: str = "", tokens_per_step: int = 1,
        tokens_per_s: Callable[[], float] = lambda: 0.0, up_bytes_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._recipe, self._fragments, self._own_id = recipe, fragments, own_id
        self._tokens_per_step, self._tokens_per_s = tokens_per_step, tokens_per_s
        self._up, self._measured_up = up_bytes_s, 0.0
        self._even = not recipe.allocator.reads_claims
        self._seen: dict[str, float] = {}

    def fragment(self, round: int) -> int:
        """The fragment that the round is of which follows `round` rounds."""
        return self._fragments.turns(round).fragment

    def saw(self, bytes_s: Mapping[str, float]) -> None:
        """How fast the frames of each other member came; all of a member's streams share its line."""
        self._seen = {peer_id: rate * len(bytes_s) for peer_id, rate in bytes_s.items()}

    def claims(self, group: str | None) -> dict[str, Any]:
        """What this peer's next join says in addition to its tokens.

        Args:
            group: the persistent one that it continues, whose members say what they saw of each other; None: a new one,
                where this peer repeats what others saw of it last.
        """
        if self._even:
            return {}
        members = sorted({*self._seen, self._own_id})
        seen = "".join(level_of(self._seen.get(peer_id, 0.0)) for peer_id in members)
        up = self._up if group else min(filter(None, (self._up, self._measured_up)), default=0.0)
        return {"speed": round(self._tokens_per_s()), "up": round(up), "seen": seen if group and self._seen else ""}

    def hear(self, joins: Sequence[tuple[str, JoinMessage]]) -> None:
        """What the others of a persistent group saw of this peer's line, for the joins of new groups."""
        for (peer_id, _), claim in zip(joins, _claims_of(joins), strict=True):
            if peer_id == self._own_id and claim.seen:
                self._measured_up = median_low(claim.seen)

    def of(self, joins: Sequence[tuple[str, JoinMessage]], round: int) -> Allotment:
        """What each of these members does of the round that follows `round` rounds."""
        if self._even:
            return Allotment()
        claims = _claims_of(joins)
        recipe, wire = self._recipe, self._fragments.at(round).wire
        steps = recipe.rounds.length(round + 1) if recipe.allocator.uneven else 0
        return recipe.allocator.allot(claims, wire, steps, self._tokens_per_step)

    def slow_line_s(self, joins: Sequence[tuple[str, JoinMessage]], round: int) -> float:
        """What the exchange of the round that follows `round` rounds may take longer, since a member's line is slow."""
        if self._even:
            return 0.0
        return self._recipe.allocator.slow_line_s(_claims_of(joins), self._fragments.at(round).wire)


def _claims_of(joins: Sequence[tuple[str, JoinMessage]]) -> list[Claim]:
    places = {peer_id: place for place, peer_id in enumerate(sorted(peer_id for peer_id, _ in joins))}

    def seen(of: str) -> tuple[float, ...]:
        said = (join.seen[places[of]] for peer_id, join in joins if peer_id != of and len(join.seen) == len(places))
        return tuple(rate for level in said if (rate := rate_of(level)) > 0.0)

    return [Claim(tokens=join.tokens, speed=join.speed, up=join.up, seen=seen(peer_id)) for peer_id, join in joins]
