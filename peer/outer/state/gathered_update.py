"""Rounds in which every member gets every payload, for sparse codecs, whose senders choose different elements.

The update of such a round is all payloads in roster order. Every member aggregates them by itself, with the same
operations in the same order, so that no member has to trust a reducer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.reduce import COSINE_SAMPLE, bound, mean_cosine
from peer.outer.compress.base import Codec, MemberPayloadError, Payload, PayloadError, check_length
from peer.outer.state.reduced_update import ConcatenatedPayloads


@dataclass(frozen=True)
class Gathered(ConcatenatedPayloads):
    """The update of a gather round; an instance is valid: every payload was decoded when it was made.

    Attributes:
        payloads: one of the whole vector per member, in roster order.
        vector: the aggregate D, fp32 [P].
        cosine: the mean between the contributions, in a sample of their values; None for fewer than two, or zeros.
        dropped: why a gate left out a contribution, by its place in the roster.
    """

    payloads: tuple[Payload, ...]
    vector: Tensor
    cosine: float | None
    dropped: Mapping[int, str]

    @property
    def numel(self) -> int:
        """P, the elements of the vector."""
        return self.vector.numel()

    def decode_range(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Elements [start, stop) of D as fp32 [stop - start], written to `out` if that is given."""
        values = self.vector[start:stop]
        return values.clone() if out is None else out.copy_(values)

    def coded(self, start: int, stop: int) -> None:
        """It has been decoded."""


@dataclass(frozen=True)
class GatherFormat:
    """How a run's gather rounds are written and aggregated.

    Attributes:
        codec: of whole contributions: of fixed size, and bound to the model's shapes.
        aggregator: what every member makes of the payloads, in roster order.
        seed: the run's; of what is random in a codec.
    """

    codec: Codec
    aggregator: Aggregator
    seed: int = 0

    @property
    def name(self) -> str:
        """Of the codec."""
        return self.codec.name

    def wire_bytes(self, n: int) -> int:
        """Of one payload of n elements."""
        return self.codec.wire_bytes(n)

    def seed_at(self, round: int) -> int:
        """Of the codec, for the round that carries a state of `round` rounds on."""
        return round_seed(self.seed, 0, round + 1)

    def split(self, payload: Payload, numel: int, members: int) -> tuple[memoryview, ...]:
        """Cut a concatenated payload back into its payloads; raises PayloadError for another length than theirs."""
        size = self.wire_bytes(numel)
        if len(payload) != size * members:
            raise PayloadError(f"{members} payloads of {numel} values are {len(payload)} bytes; {size} each")
        view = memoryview(payload)
        return tuple(view[start : start + size] for start in range(0, len(view), size))

    def update(
        self, payloads: Sequence[Payload], weights: Sequence[int], numel: int, round: int,
        known: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Gathered:  # fmt: skip
        """Decode and aggregate what the members of a round sent.

        Args:
            payloads: one payload of `numel` elements per member, in roster order.
            weights: tokens per member.
            round: rounds of the state that the update carries on.
            known: what payloads decode to, fp32 [numel] by their places; overwritten.

        Raises:
            MemberPayloadError: a payload is malformed, and the aggregator does not drop such.
            ValueError: no aggregate: a gate dropped all contributions, or it left fp32's range.
        """
        if len(payloads) != len(weights):
            raise ValueError(f"{len(payloads)} contributions with {len(weights)} weights: must be equal")
        codec, aggregator = self.codec.seeded(self.seed_at(round)), bound(self.aggregator, len(payloads))
        stride = max(1, numel // COSINE_SAMPLE)
        sample = torch.empty(len(payloads), -(-numel // stride))
        dropped: Mapping[int, str] = {}

        def decoded(place: int) -> Tensor:
            vector = known[place] if place in known else self._decoded(codec, payloads[place], numel, place)
            sample[place] = vector[::stride]
            return vector

        if isinstance(aggregator, Mean):
            factors = aggregator.factors(weights)
            vector = decoded(0).mul_(factors[0])
            for place in range(1, len(payloads)):
                vector.add_(decoded(place).mul_(factors[place]))
        else:
            contributions = [decoded(place) for place in range(len(payloads))]
            if isinstance(aggregator, Gated):
                vector, dropped = aggregator.judged(contributions, weights)
            else:
                vector = aggregator.aggregate(contributions, weights)
        return Gathered(tuple(payloads), vector, mean_cosine((sample @ sample.T).double()), dropped)

    def _decoded(self, codec: Codec, payload: Payload, numel: int, place: int) -> Tensor:
        """Where gates decide, what is malformed is theirs to drop: one sender must not end the round for all."""
        try:
            check_length(payload, self.wire_bytes(numel), self.name, numel)
            return codec.decode(payload, numel)
        except PayloadError as error:
            if not isinstance(self.aggregator, Gated):
                raise MemberPayloadError(place, error) from None
            return torch.full((numel,), torch.nan)


def round_seed(seed: int, fragment: int, round: int) -> int:
    """What is random in a round, counted from 1, of one fragment: the same for all peers of a run."""
    return zlib.crc32(f"{seed}/{fragment}/{round}".encode())
