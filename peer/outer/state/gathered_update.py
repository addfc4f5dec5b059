"""Rounds in which every member gets every payload, for sparse codecs, whose senders choose different elements.

The update of such a round is all payloads in roster order. Every member aggregates them by itself, with the same
operations in the same order, so that no member has to trust a reducer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar

from torch import Tensor

from peer.outer.aggregate.base import Aggregator
from peer.outer.compress.base import (
    LARGEST_CONTRIBUTION,
    Codec,
    NonFiniteError,
    Payload,
    PayloadError,
    check_length,
    check_values,
)
from peer.outer.compress.feedback import Encoder, ErrorFeedback
from peer.outer.compress.topk import TopK
from peer.outer.math.aggregation import COSINE_SAMPLE, Aggregation
from peer.outer.math.source import Source
from peer.outer.math.step import Decoded
from peer.outer.state.reduced_update import ConcatenatedPayloads
from peer.outer.state.wire_format import NOTHING, Sender, WireFormat

LENGTH_BYTES = 8
SLICE_BYTES = 1 << 19  # of a payload; part of the protocol, since members sign a tree of slices


@dataclass(frozen=True)
class Gathered(Decoded, ConcatenatedPayloads):
    """The update of a gather round; an instance is valid: every payload was decoded when it was made.

    Attributes:
        vector: the aggregate D, fp32 [P].
        payloads: one of the whole vector per member, in roster order.
        aggregation: whose contributions were dropped, and how alike they were, in a sample of their values.
        exact: whether the codec's payloads are all of one length.
    """

    payloads: tuple[Payload, ...]
    aggregation: Aggregation | None = None
    exact: bool = True

    @property
    def parts(self) -> tuple[Payload, ...]:
        """The payloads; the length of each before it, where it depends on the values."""
        if self.exact:
            return self.payloads
        return tuple(part for own in self.payloads for part in (len(own).to_bytes(LENGTH_BYTES, "little"), own))


class WholeSender(Sender):
    """The contributions of one peer, each encoded whole; see `Sender`."""

    residual: Encoder

    def __init__(self, written: GatherFormat, feedback: ErrorFeedback | None) -> None:
        self._written = written
        self.residual = Encoder(written.codec, feedback, written.numel)

    def encode(self, source: Source, start: int, stop: int, round: int, share: int = 0) -> Payload:
        assert (start, stop) == (0, source.numel), f"[{start}, {stop}) is not the whole of {source.numel}"
        seed = self._written.seed_at(round)
        try:
            codec = self._written.keeping(share)
            payload, self.received = self.residual.encode_decoded(source.read(start, stop), seed, codec)
        except NonFiniteError:
            raise NonFiniteError("local parameters hold NaN or infinity") from None
        return payload


@dataclass(frozen=True)
class GatherFormat(WireFormat):
    """No member reduces: each sends its whole payload to all others; see `WireFormat`.

    Attributes:
        numel: elements of the vector.
        codec: of whole contributions, bound to the model's shapes.
        aggregator: what every member makes of the payloads, in roster order.
        seed: the run's; of what is random in a codec.
        fragment: that the vector is.
        shares: values that each member sends of a block; none: as many as the codec says.
    """

    numel: int
    codec: Codec
    aggregator: Aggregator
    seed: int = 0
    fragment: int = 0
    shares: tuple[int, ...] = ()
    drawn: ClassVar[bool] = True  # type: ignore[misc]

    def among(self, shares: Sequence[int]) -> GatherFormat:
        for share in shares:
            self.keeping(share)
        if shares and isinstance(self.codec, TopK) and sum(shares) > len(shares) * (self.codec.records.k + 2):
            raise PayloadError(f"{len(shares)} members claim {sum(shares)} values per block in total, above the limit")
        return replace(self, shares=tuple(shares)) if shares else self

    def keeping(self, share: int) -> Codec:
        """The codec of a member; raises PayloadError if it cannot send so many values."""
        if not share:
            return self.codec
        if not isinstance(self.codec, TopK):
            raise PayloadError(f"{self.codec.name} does not support a number of values for each member")
        return self.codec.keeping(share)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """See `WireFormat`."""
        return self.codec.fixed_size

    @property
    def wire_bytes(self) -> int:
        """Of one payload, at most, where all members send alike."""
        return self.codec.wire_bytes(self.numel)

    def bytes_of(self, place: int) -> int:
        """Of that member's payload, at most."""
        return self.keeping(self.share(place)).wire_bytes(self.numel)

    def seed_at(self, round: int) -> int:
        """Of the codec, for the round that carries a state of `round` rounds on."""
        return round_seed(self.seed, self.fragment, round + 1)

    def codec_at(self, round: int) -> Codec:
        return self.codec.seeded(self.seed_at(round))

    def mean(
        self, aggregation: Aggregation, payloads: Sequence[Payload], start: int, stop: int, round: int  # noqa: ARG002
    ) -> tuple[Tensor, Aggregation]:
        update = self.update(payloads, [1] * len(payloads), round)
        return update.vector, update.aggregation or aggregation

    def broadcast_bytes(self, members: int, place: int) -> list[int]:  # noqa: ARG002
        full, rest = divmod(self.bytes_of(place), SLICE_BYTES)
        return [SLICE_BYTES] * full + ([rest] if rest else [])

    def sender(self, feedback: ErrorFeedback | None) -> WholeSender:
        return WholeSender(self, feedback)

    def update(
        self, payloads: Sequence[Payload], weights: Sequence[int], round: int,
        known: Mapping[int, Tensor] = NOTHING,
    ) -> Gathered:  # fmt: skip
        """See `WireFormat.update`: every payload is decoded, and all are aggregated."""
        seed = self.seed_at(round)
        aggregation = Aggregation(self.aggregator, weights, stride=max(1, -(-self.numel // COSINE_SAMPLE)))
        contributions = [
            partial(self._decoded, self.keeping(self.share(place)).seeded(seed), payload, known.get(place))
            for place, payload in enumerate(payloads)
        ]
        return Gathered(aggregation.aggregate(contributions, self.numel), tuple(payloads), aggregation, self.exact)

    def _decoded(
        self, codec: Codec, payload: Payload, known: Tensor | None, start: int, stop: int, room: Tensor | None  # noqa: ARG002
    ) -> Tensor:
        if self.exact:
            check_length(payload, codec.wire_bytes(self.numel), codec.name, self.numel)
        values = codec.decode(payload, self.numel) if known is None else known
        check_values(values, LARGEST_CONTRIBUTION)
        return values

    def split(self, payload: Payload, weights: Sequence[int], round: int) -> Gathered:
        members, view = len(weights), memoryview(payload)
        if not self.exact:
            return self.update(self._cut(view, members), weights, round)
        ends = list(accumulate(map(self.bytes_of, range(members)), initial=0))
        if len(payload) != ends[-1]:
            raise PayloadError(f"{members} payloads of {self.numel} values are {len(view)} bytes; must be {ends[-1]}")
        return self.update([view[start:end] for start, end in pairwise(ends)], weights, round)

    def _cut(self, view: memoryview, members: int) -> list[Payload]:
        """The payloads of so many members, each after its length."""
        found, at = list[Payload](), 0
        for _ in range(members):
            start = at + LENGTH_BYTES
            size = int.from_bytes(view[at:start], "little")
            at = start + size
            if size > self.wire_bytes or at > len(view):
                break
            found.append(view[start:at])
        if len(found) < members or at != len(view):
            raise PayloadError(f"{len(view)} bytes are not {members} payloads of at most {self.wire_bytes}")
        return found

    def update_bytes(self, members: int) -> int:
        return sum(self.bytes_of(place) + (0 if self.exact else LENGTH_BYTES) for place in range(members))


def round_seed(seed: int, fragment: int, round: int) -> int:
    """What is random in a round, counted from 1, of one fragment: the same for all peers of a run."""
    return zlib.crc32(f"{seed}/{fragment}/{round}".encode())
