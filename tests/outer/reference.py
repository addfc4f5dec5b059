"""What a round must come to, computed from whole vectors in one place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.compress.base import Payload
from peer.outer.math.aggregation import Aggregation
from peer.outer.math.source import FeedbackEncoder
from peer.outer.state.outer_state import OuterState
from peer.outer.state.wire_format import AnyUpdate, Sender


def sent(state: OuterState, sender: Sender, local: Tensor, start: int = 0, stop: int | None = None) -> Payload:
    """Elements [start, stop) of a member's contribution."""
    source = state.source(local)
    return sender.encode(source, start, source.numel if stop is None else stop, state.part.rounds)


def gathered(
    state: OuterState, senders: Sequence[Sender], locals_: Sequence[Tensor], weights: Sequence[int]
) -> AnyUpdate:
    """The update of a gather round."""
    payloads = [sent(state, sender, local) for sender, local in zip(senders, locals_, strict=True)]
    return state.wire.update(payloads, weights, state.part.rounds)


def reduced(
    state: OuterState, locals_: Sequence[Tensor], weights: Sequence[int], aggregator: Aggregator = Mean(),
    senders: Sequence[Sender] = (), residuals: Sequence[FeedbackEncoder | None] = (),
) -> AnyUpdate:  # fmt: skip
    """The update of a round that reduces; with error feedback, `residuals` are those of the members as reducers."""
    wire, count = state.wire, len(locals_)
    senders = senders or [wire.sender(None)] * count
    payloads = []
    for place, lost in enumerate(residuals or [None] * count):
        aggregation, shard = Aggregation(aggregator, weights), b""
        for start, stop in wire.slices(count, place):
            slices = [sent(state, sender, local, start, stop) for sender, local in zip(senders, locals_, strict=True)]
            shard += wire.reduce(aggregation, slices, start, stop, lost)
        payloads.append(shard)
    return wire.update(payloads, weights, state.part.rounds)
