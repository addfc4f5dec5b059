"""How the vector of a run is written on the wire: the one interface of rounds that reduce, and of those that gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from peer.outer.compress.base import Codec, Payload
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.undoable import Undoable
from peer.outer.math.aggregation import Aggregation
from peer.outer.math.source import FeedbackEncoder, Source
from peer.outer.state.gathered_update import Gathered
from peer.outer.state.reduced_update import Update

AnyUpdate = Update | Gathered


class Sender(Protocol):
    """The contributions of one peer, and what error feedback keeps of them.

    Attributes:
        received: what the others decode the payload sent last to, fp32 [n], where they decode it themselves.
    """

    received: Tensor | None

    @property
    def residual(self) -> Undoable[Any, Any] | None:
        """To commit or to revert after each round; None without error feedback."""

    def encode(self, source: Source, start: int, stop: int, round: int) -> Payload:
        """The payload of elements [start, stop), in the round that carries a state of `round` rounds on.

        Raises:
            NonFiniteError: see `Source.encode`.
        """


class WireFormat(Protocol):
    """The payloads of one vector: how they are cut among the members of a round, and the update that is made of them.

    A place is a member's, in a roster of so many `members`.
    """

    @property
    def numel(self) -> int:
        """Elements of the vector."""

    @property
    def codec(self) -> Codec:
        """Of each slice, or of the whole vector."""

    @property
    def cell(self) -> int:
        """Elements of what shards are made of whatever the number of members, and what residuals are signed by."""

    def bounds(self, members: int) -> Sequence[tuple[int, int]]:
        """[start, stop) of the shard that each member reduces."""

    def slices(self, members: int, place: int) -> Sequence[tuple[int, int]]:
        """[start, stop) of each slice of a contribution that is sent to that member alone."""

    def contributed_bytes(self, members: int, place: int) -> list[int]:
        """Bytes of each of them."""

    def broadcast_bytes(self, members: int, place: int) -> list[int]:
        """Bytes of each slice that the member sends to all others."""

    def sender(self, feedback: ErrorFeedback | None) -> Sender:
        """What encodes a peer's contributions."""

    def reduce(
        self, aggregation: Aggregation, payloads: Sequence[Payload], start: int, stop: int,
        feedback: FeedbackEncoder | None = None,
    ) -> bytes:  # fmt: skip
        """What the reducer of slice [start, stop) sends to all; raises as `Aggregation.reduce`.

        Args:
            payloads: of this slice, one per member.
            feedback: what the reducer lost before.
        """

    def update(
        self, payloads: Sequence[Payload], weights: Sequence[int], round: int, known: Mapping[int, Tensor] = ...
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

    def split(self, payload: Payload, weights: Sequence[int], round: int) -> AnyUpdate:
        """`update` of the payloads that lie in `payload` one after the other, as donors send them; raises as that."""

    def update_bytes(self, members: int) -> int:
        """The most that an update of so many members has."""
