"""How many steps each of unequal peers makes per round, how much it reduces, and how much it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.outer.recipe.recipe import Recipe
from peer.sim.world.network import links_of
from peer.sim.world.scenario import PeerProfile


@dataclass(frozen=True, kw_only=True)
class Division:
    """By index of the peer; None where all are alike.

    Attributes:
        steps: inner steps of a round.
        shares: fraction of the vector that each peer reduces.
        payload_ratios: of each peer's payload to the one that the recipe names.
    """

    steps: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    payload_ratios: tuple[float, ...] | None = None


def divide(recipe: Recipe, profiles: Sequence[PeerProfile], step_s: float, payload_bytes: float) -> Division:
    """What the recipe's allocator makes of these peers.

    Args:
        step_s: seconds of an inner step at speed 1.
        payload_bytes: of one contribution.
    """
    allocator, links = recipe.allocator, links_of(profiles)
    if not allocator.uneven:
        return Division(payload_ratios=allocator.payload_ratios(links))
    speeds = [profile.speed / step_s for profile in profiles]
    total = recipe.steps_per_round * len(profiles)
    work = allocator.allocate(speeds, links, total, max(1, int(payload_bytes)))
    return Division(steps=tuple(max(1, steps) for steps in work.steps), shares=work.shares)
