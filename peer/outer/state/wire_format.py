"""How the vector of a run is written on the wire: the one interface of rounds that reduce, and of those that gather."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from peer.outer.compress.base import Codec, Payload
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.undoable import Undoable
from peer.outer.math.aggregation import Aggregation
from peer.outer.math.source import FeedbackEncoder, Source
from peer.outer.math.step import Aggregate

NOTHING: Mapping[int, Tensor] = MappingProxyType({})


class AnyUpdate(Aggregate, Protocol):
    """What carries a state on, and how it is stored, served and hashed."""

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """One for each member, in roster order."""

    @property
    def parts(self) -> tuple[Payload, ...]:
        """What `payload` consists of."""

    @property
    def aggregation(self) -> Aggregation | None:
        """What became of the contributions, where every member aggregates them by itself."""

    @property
    def payload(self) -> bytes:
        """All payloads, one after the other."""

    def digest(self) -> str:
        """BLAKE3 of `payload` as 64 hex digits."""


class Sender(ABC):
    """The contributions of one peer, and what error feedback keeps of them.

    Attributes:
        received: what the others decode the payload sent last to, fp32 [n], where they decode it themselves.
        residual: to commit or to revert after each round; None without error feedback.
    """

    received: Tensor | None = None
    residual: Undoable[Any, Any] | None

    @abstractmethod
    def encode(self, source: Source, start: int, stop: int, round: int, share: int = 0) -> Payload:
        """The payload of elements [start, stop), in the round that carries a state of `round` rounds on.

        Args:
            share: this peer's own, where members do not all do the same.

        Raises:
            NonFiniteError: see `Source.encode`.
        """


class WireFormat(ABC):
    """The payloads of one vector: how they are cut among the members of a round, and the update that is made of them.

    A place is a member's, in a roster of so many `members`.

    Attributes:
        numel: elements of the vector.
        codec: of each slice, or of the whole vector.
        exact: whether a payload is exactly as long as is said here; else that is the most.
        cell: elements of what shards are made of whatever the number of members, and what residuals are signed by.
        shares: of the members, where they do not all do the same.
        drawn: whether a payload depends on what is drawn for its round.
    """

    numel: int
    codec: Codec
    exact = True
    drawn = False
    cell = 1
    shares: tuple[int, ...] = ()

    @abstractmethod
    def among(self, shares: Sequence[int]) -> WireFormat:
        """The same in a round whose members do not all do the same; raises PayloadError if they cannot do that.

        Args:
            shares: see `Member.share`, in roster order; none: all do the same.
        """

    def share(self, place: int) -> int:
        """Of that member; 0 where all do the same."""
        return self.shares[place] if self.shares else 0

    def bounds(self, members: int) -> Sequence[tuple[int, int]]:
        """[start, stop) of the shard that each member reduces; empty where none does."""
        return ((0, 0),) * members

    def slices(self, members: int, place: int) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        """[start, stop) of each slice of a contribution that is sent to that member alone."""
        return ()

    def contributed_bytes(self, members: int, place: int) -> list[int]:
        """Bytes of each of them."""
        return [self.codec.wire_bytes(stop - start) for start, stop in self.slices(members, place)]

    def reduce(
        self, aggregation: Aggregation, payloads: Sequence[Payload], start: int, stop: int,  # noqa: ARG002
        feedback: FeedbackEncoder | None = None,  # noqa: ARG002
    ) -> bytes:  # fmt: skip
        """What the reducer of slice [start, stop) sends to all; raises as `Aggregation.reduce`.

        Args:
            payloads: of this slice, one per member.
            feedback: what the reducer lost before.
        """
        raise AssertionError(f"{self.codec.name}: payloads are gathered, not reduced")

    def codec_at(self, round: int) -> Codec:  # noqa: ARG002
        """Of contributions to the round that carries a state of `round` rounds on."""
        return self.codec

    @abstractmethod
    def mean(
        self, aggregation: Aggregation, payloads: Sequence[Payload], start: int, stop: int, round: int
    ) -> tuple[Tensor, Aggregation]:
        """What the payloads of [start, stop) come to, where each member computes it by itself, fp32 [stop - start];
        and the aggregation that saw them. Raises as `update`.
        """

    @abstractmethod
    def broadcast_bytes(self, members: int, place: int) -> list[int]:
        """Bytes of each slice that the member sends to all others."""

    @abstractmethod
    def sender(self, feedback: ErrorFeedback | None) -> Sender:
        """What encodes a peer's contributions."""

    @abstractmethod
    def update(
        self, payloads: Sequence[Payload], weights: Sequence[int], round: int, known: Mapping[int, Tensor] = NOTHING
    ) -> AnyUpdate:
        """The update that carries a state of `round` rounds on.

        Args:
            payloads: what each member of the round sent to all, in roster order.
            weights: tokens per member.
            known: what payloads decode to, fp32 [numel] by their places.

        Raises:
            PayloadError: a payload of the wrong length, or malformed.
            ValueError: no aggregate.
        """

    @abstractmethod
    def split(self, payload: Payload, weights: Sequence[int], round: int) -> AnyUpdate:
        """`update` of the payloads that lie in `payload` one after the other, as donors send them; raises as that."""

    @abstractmethod
    def update_bytes(self, members: int) -> int:
        """The most that an update of so many members has."""
