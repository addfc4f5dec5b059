"""The fragments of a run's vector: where each lies, how it is written, and which of them a round is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from peer.outer.state.wire_format import WireFormat


class Turn(NamedTuple):
    """What one round of a run is of, and how many rounds that had before.

    Attributes:
        moments: 0: the anchor's fragment; 1 or 2: the first or the second moments of the inner optimizers.
    """

    fragment: int
    rounds: int
    moments: int = 0


Turns = Callable[[int], Turn]
"""(rounds of the run before) -> the turn that follows them."""


def whole(round: int) -> Turn:
    """Every round is of the whole vector."""
    return Turn(0, round)


@dataclass(frozen=True)
class Part:
    """The fragment that a round is of.

    Attributes:
        start, stop: its elements in the vector.
        wire: how its contributions and updates are written.
        rounds: that it had before.
        moments: see `Turn`.
    """

    index: int
    start: int
    stop: int
    wire: WireFormat
    rounds: int
    moments: int = 0


class Fragments:
    """A vector as consecutive ranges that are synchronised one after the other; usually it is one range.

    Args:
        wires: of each fragment, in the order of the vector.
        turns: of the recipe's schedule.
        exact: how moments are written, where peers average them.

    Attributes:
        sizes: elements of each fragment.
        bounds: [start, stop) of each.
        numel: elements in all.
    """

    def __init__(self, wires: Sequence[WireFormat], turns: Turns = whole, exact: WireFormat | None = None) -> None:
        self.wires, self.turns, self.exact = tuple(wires), turns, exact
        self.sizes = tuple(wire.numel for wire in wires)
        self.bounds = tuple(pairwise(accumulate(self.sizes, initial=0)))
        self.numel = sum(self.sizes)

    @classmethod
    def of(cls, wire: WireFormat | Fragments) -> Fragments:
        """The one fragment that is written like this."""
        return wire if isinstance(wire, Fragments) else cls((wire,))

    def __len__(self) -> int:
        return len(self.wires)

    def at(self, round: int) -> Part:
        """The fragment whose turn it is after `round` rounds of the run."""
        turn = self.turns(round)
        wire = self.exact if turn.moments and self.exact is not None else self.wires[turn.fragment]
        return Part(turn.fragment, *self.bounds[turn.fragment], wire, turn.rounds, turn.moments)
