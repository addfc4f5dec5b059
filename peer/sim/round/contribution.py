"""What a simulated peer has to say in a round, what of it travels, and what the round leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from peer.outer.compress.base import NonFiniteError, is_finite
from peer.outer.math.ranges import Ranges
from peer.outer.math.source import Source
from peer.outer.recipe.recipe import Recipe
from peer.sim.learner.replica import Learner
from peer.sim.world.scenario import PeerProfile

SLICE = 1 << 17  # elements that travel as one slice: 512 KiB of fp32
ReadFragment = Callable[[int, int], Tensor]
"""(start, stop) -> the values [start, stop) of a fragment, fp32."""
Moves = tuple[Tensor, ...]
"""What to add to each of a learner's iterates, fp32 [P]."""


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one member sends for one fragment.

    Attributes:
        read: the decoded values; None when only time is simulated.
        base: the peer's own fragment at the snapshot, kept while it trains on.
        profile: of the member, which may be Byzantine.
    """

    member: int
    weight: int
    wire_bytes: float
    read: ReadFragment | None
    profile: PeerProfile
    base: Tensor | None = None


@dataclass
class CommittedRound:
    """What a committed round leaves for the merges of its members.

    Attributes:
        dropped: members whose contribution was refused.
        anchor_before: fp32 [n], where the merge pulls towards the old anchor.
        moves: of members that take up a mean of parameters later: by how much it moves each of theirs.
    """

    dropped: list[int] = field(default_factory=list)
    anchor_before: Tensor | None = None
    moves: dict[int, Moves] = field(default_factory=dict)
    round: int = 0


def reader(vector: Tensor) -> ReadFragment:
    """Reads from a vector of the whole fragment."""
    return lambda start, stop: vector[start:stop]


def source_of(recipe: Recipe, learner: Learner, ranges: Ranges) -> Source:
    """What the peer has to say for the fragment in `ranges`, before any codec.

    Args:
        learner: whose; read when the values are.
    """
    if recipe.payload == "gradient":
        return Source(learner.gradient, None, ranges)
    anchor = None if recipe.payload == "parameters" else learner.outer.anchor if learner.base is None else learner.base
    if learner.own is not None:
        learner.own.subtract(sent := learner.parameters.clone())
        return Source(sent, anchor, ranges)
    source = Source(learner.parameters, anchor, ranges)
    if learner.shadow is None:
        return source
    kept, before = recipe.local.kept, Source(learner.shadow.parameters.in_ram, learner.shadow.anchor, ranges)
    return Source(source.read(0, source.numel) - kept * before.read(0, source.numel), None)


def is_usable(read: ReadFragment, length: int) -> bool:
    """Strict parsing refuses what is not finite; a receiver does the same with every payload of `length` values."""
    try:
        return all(is_finite(read(start, min(start + SLICE, length))) for start in range(0, length, SLICE))
    except NonFiniteError:
        return False
