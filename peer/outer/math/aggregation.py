"""What a round makes of its contributions: one aggregate, and the one payload that it is written in.

Reducers, auditors, gossip rounds, gather rounds and the simulator all come here: a function of contributions, weights
and aggregator alone, the same bits on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from peer.outer.aggregate.base import Aggregator
from peer.outer.compress.base import MemberPayloadError, PayloadError, Read
from peer.outer.numerics.kernels import add_scaled
from peer.outer.numerics.scratch import scratch_vector
from peer.outer.numerics.tiles import TILE_ELEMENTS
from peer.outer.record import MAX_DROPS, MAX_REASON_CHARS, Drop

ReadValues = Callable[[int, int, Tensor | None], Tensor]
"""(start, stop, room for them) -> the values [start, stop) of one member, in that room or elsewhere; only read."""
Write = Callable[[int, Read], bytes]
"""(numel, read) -> payload"""
COSINE_SAMPLE = 1 << 16  # values of every range: an eighth of a large shard tells the cosine to a few thousandths
_PLACE = re.compile(r"contribution (\d+)$")


class Aggregation:
    """The contributions of one round, aggregated range by range in roster order.

    Args:
        aggregator: of the recipe.
        weights: one per contribution, in roster order (tokens).
        members: of the round, if some of them contribute nothing.
        stride: of the values that `cosine` is taken from; 0 for none.

    Attributes:
        reasons: why the aggregator dropped a contribution first, by its place.
    """

    def __init__(
        self, aggregator: Aggregator, weights: Sequence[float], *, members: int | None = None, stride: int = 1
    ) -> None:
        self._weights, self._stride = weights, stride
        self._aggregator = aggregator.bind(len(weights) if members is None else members)
        self._gram = torch.zeros(len(weights), len(weights), dtype=torch.float64)
        self._room: Sequence[Tensor] = ()
        self._ranges, self._drops = 0, Counter[int]()
        self.reasons: dict[int, str] = {}

    def reduce(self, contributions: Sequence[ReadValues], numel: int, write: Write) -> bytes:
        """One payload for one range of `numel` elements of all contributions.

        Args:
            write: encodes the aggregate; with error feedback, what was lost before takes part.

        Raises:
            MemberPayloadError: a contribution is malformed, and the aggregator does not drop such.
            ValueError: not one weight per contribution, or no aggregate; see `Aggregator.aggregate`.
        """
        if self._aggregator.separable:
            self._ranges += 1
            return write(numel, partial(self._tile, contributions))
        whole = self.aggregate(contributions, numel)
        return write(numel, lambda start, stop: whole[start:stop])

    def aggregate(self, contributions: Sequence[ReadValues], numel: int) -> Tensor:
        """The aggregate of one range as a new fp32 [numel]; raises as `reduce`."""
        self._ranges += 1
        return self._tile(contributions, 0, numel)

    @property
    def cosine(self) -> float | None:
        """Mean of the pairwise cosines of the contributions; None for fewer than two, or zeros."""
        members, norms = len(self._gram), self._gram.diagonal().clamp_min(0.0).sqrt()
        if members < 2 or bool((norms == 0).any()):
            return None
        cosines = self._gram / torch.outer(norms, norms)
        mean = float((cosines.sum() - members) / (members * (members - 1)))
        return min(1.0, max(-1.0, mean)) if mean == mean else None

    def drops(self, order: Sequence[str]) -> tuple[Drop, ...]:
        """The members, named in this order, that the aggregator left out; the most often dropped first."""
        return tuple(
            Drop(peer_id=order[place], slices=count, of=self._ranges, reason=_named(self.reasons[place], order))
            for place, count in self._drops.most_common(MAX_DROPS)
        )

    def _tile(self, contributions: Sequence[ReadValues], start: int, stop: int) -> Tensor:
        count, n = len(contributions), stop - start
        if count != len(self._weights):
            raise ValueError(f"{count} contributions with {len(self._weights)} weights: must be equal")
        factors = self._aggregator.factors(self._weights)
        rooms = self._rooms(count, n)
        length = min(COSINE_SAMPLE, -(-n // self._stride)) if self._stride else 0
        sample = scratch_vector(count * length).view(count, length)

        def read(place: int) -> Tensor:
            values = self._read(contributions[place], place, start, stop, rooms[0 if factors is not None else place])
            if self._stride:
                sample[place] = values[:: self._stride][:COSINE_SAMPLE]
            return values

        if factors is not None:  # `scaled_sum`, one at a time: two vectors, however many contributions there are
            result = torch.mul(read(0), factors[0], out=scratch_vector(n))
            for place in range(1, count):
                add_scaled(result, read(place), factors[place])
        else:
            result, reasons = self._aggregator.judged([read(place) for place in range(count)], self._weights)
            self._drops.update(reasons.keys())
            self.reasons = {**reasons, **self.reasons}
        self._gram.add_((sample @ sample.T).double())
        return result

    def _read(self, contribution: ReadValues, place: int, start: int, stop: int, room: Tensor | None) -> Tensor:
        try:
            return contribution(start, stop, room)
        except PayloadError as error:
            if not self._aggregator.drops_malformed:
                raise MemberPayloadError(place, error) from None
            return torch.full((stop - start,), torch.nan)

    def _rooms(self, count: int, n: int) -> Sequence[Tensor | None]:
        """Kept for the next range: fresh memory costs more than the decoding."""
        if n > TILE_ELEMENTS:
            return [None] * count
        if len(self._room) < count or len(self._room[0]) < n:
            self._room = [scratch_vector(n) for _ in range(count)]
        return [room[:n] for room in self._room]


def _named(reason: str, order: Sequence[str]) -> str:
    """A gate's reason with the peer id in place of its place, as long as a record takes."""
    return _PLACE.sub(lambda match: order[int(match[1])], reason)[:MAX_REASON_CHARS]
