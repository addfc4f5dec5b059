"""The arithmetic of a gossip round: what a member sends, and what its group's contributions make of its own state.

The same functions of `peer.outer` as in the simulator, in the same order: a round among the same contributions yields
the same state, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.outer.aggregate.reduce import ReduceRule, bound, mean_cosine, reduce_range
from peer.outer.compress.base import MemberPayloadError, NonFiniteError, Payload, PayloadError, is_finite
from peer.outer.compress.identity import Fp32
from peer.outer.compress.residual import Residual
from peer.outer.compress.sliced import Sliced
from peer.outer.numerics.tiles import tile_ranges
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import MAX_DROPS, MAX_REASON_CHARS, Drop
from peer.outer.round import RoundAborted
from peer.outer.state.gossip_mixing import centre_of, drift, move_
from peer.outer.state.outer_state import OuterState

_ANCHORS = Fp32()  # anchors are not differences: no coarse codec may touch them


class Mixing:
    """The gossip rounds of one peer.

    Args:
        state: this peer's own; its codec is `Sliced`.

    Attributes:
        slices: [start, stop) of what travels as one frame.
        sizes: bytes of each frame: the payload, then with payload `delta` the anchor.
    """

    def __init__(self, recipe: Recipe, state: OuterState) -> None:
        assert isinstance(state.compressor, Sliced)
        self._recipe, self._state, self._codec = recipe, state, state.compressor.base
        self._lost = None if recipe.feedback is None else Residual(recipe.feedback, state.numel)
        self._deltas = recipe.payload == "delta"
        self.slices = state.compressor.slices(0, state.numel)
        self.sizes = [self._wire_bytes(stop - start) for start, stop in self.slices]

    def _wire_bytes(self, numel: int) -> int:
        return self._codec.wire_bytes(numel) + (_ANCHORS.wire_bytes(numel) if self._deltas else 0)

    def encode(self, index: int, snapshot: Tensor) -> bytes:
        """One frame of this peer's contribution.

        Raises:
            RoundAborted: the local parameters hold NaN or infinity.
        """
        start, stop = self.slices[index]

        def read(first: int, last: int) -> Tensor:
            local = snapshot[start + first : start + last]
            return self._state.anchor[start + first : start + last] - local if self._deltas else local

        try:
            if self._lost is not None:
                payload = self._lost.encode(self._codec, start, stop, read)
            else:
                payload = self._codec.encode_ranges(stop - start, read)
        except NonFiniteError:
            raise RoundAborted("exchange", f"local parameters [{start}, {stop}) hold NaN or infinity") from None
        return payload + _ANCHORS.encode(self._state.anchor[start:stop]) if self._deltas else payload

    def applied(self) -> None:
        """The round of what was encoded last is over: what the codec left out of it is carried to the next."""
        if self._lost is not None:
            self._lost.commit()

    def revert(self) -> None:
        """The round came to nothing."""
        if self._lost is not None:
            self._lost.revert()

    def begin(self, round: int, members: Sequence[str], weights: Sequence[int], me: int, snapshot: Tensor) -> Mixture:
        """What this group's contributions come to.

        Args:
            members, weights: in the order in which all add up.
        """
        return Mixture(self._recipe, self._state, round, members, weights, me, snapshot)


class Mixture:
    """One round: frames in, a direction or parameters out; the state changes when `apply` is called, and not before."""

    def __init__(
        self, recipe: Recipe, state: OuterState, round: int, members: Sequence[str], weights: Sequence[int], me: int,
        snapshot: Tensor,
    ) -> None:
        assert isinstance(state.compressor, Sliced)
        self._recipe, self._state, self._codec = recipe, state, state.compressor.base
        self._round, self._members, self._me, self._snapshot = round, members, me, snapshot
        self._deltas = recipe.payload == "delta"
        self._weights = list(weights) if self._deltas else [1] * len(members)
        self._rule = ReduceRule(compressor=self._codec, aggregator=bound(recipe.aggregator, len(members)))
        self._gram = torch.zeros(len(members), len(members), dtype=torch.float64)
        self._result = torch.empty(state.numel)
        self._dropped: dict[int, list[str]] = {}
        self._slices = 0

    def take(self, start: int, stop: int, frames: Sequence[Payload]) -> None:
        """Mix one slice; a frame of each member.

        Raises:
            RoundAborted: a frame is malformed (with its sender), or what it comes to is nothing that can be applied.
        """
        numel, views = stop - start, [memoryview(frame) for frame in frames]
        size = self._codec.wire_bytes(numel)
        payloads, dropped = [view[:size] for view in views], dict[int, str]()
        self._slices += 1
        try:
            reduced = reduce_range(payloads, self._weights, numel, self._rule, self._gram, dropped)
            mean = self._codec.decode_range(reduced, numel, 0, numel, checked=True)
            self._mix(start, stop, mean, payloads, [view[size:] for view in views])
        except MemberPayloadError as error:
            raise RoundAborted("exchange", f"malformed contribution: {error}", self._members[error.place]) from None
        except (ValueError, PayloadError) as error:  # the gates dropped all, or fp32's range was left
            raise RoundAborted("exchange", f"no mean: {error}") from None
        for place, reason in dropped.items():
            self._dropped.setdefault(place, []).append(reason)

    def _mix(
        self, start: int, stop: int, mean: Tensor, payloads: Sequence[Payload], anchors: Sequence[Payload]
    ) -> None:
        result = self._result[start:stop]
        if not self._deltas:
            result.copy_(self._snapshot[start:stop])
            if len(payloads) > 1:  # a peer alone keeps its own
                sent = self._codec.decode_range(payloads[self._me], stop - start, 0, stop - start)
                move_(result, mean, sent, replaces=self._recipe.compressor == "fp32")
            _check_finite(result)
            return
        own = self._state.anchor[start:stop]
        if len(anchors) > 1:
            mean = drift(mean, own, centre_of(_decoded_anchors(anchors, stop - start)))
        result.copy_(mean)
        anchor, buffers = own.clone(), [buffer[start:stop].clone() for buffer in self._state.buffers]
        self._recipe.optimizer.step_(anchor, buffers, result, round=self._round - 1)
        for tensor in (anchor, *buffers):
            _check_finite(tensor)

    @property
    def cosine(self) -> float | None:
        """The mean between what was contributed."""
        return mean_cosine(self._gram)

    @property
    def drops(self) -> tuple[Drop, ...]:
        """The members that the aggregator left out."""
        return tuple(
            Drop(peer_id=self._members[at], slices=len(why), of=self._slices, reason=why[0][:MAX_REASON_CHARS])
            for at, why in sorted(self._dropped.items())[:MAX_DROPS]
        )

    def apply(self) -> None:
        """Change the state, in place; every slice has been taken, and its result is finite."""
        state = self._state
        if not self._deltas:
            state.anchor.copy_(self._result)
            return
        for start, stop in tile_ranges(0, state.numel):
            buffers = [buffer[start:stop] for buffer in state.buffers]
            direction = self._result[start:stop]
            self._recipe.optimizer.step_(state.anchor[start:stop], buffers, direction, round=self._round - 1)


def _decoded_anchors(anchors: Sequence[Payload], numel: int) -> list[Tensor]:
    decoded: list[Tensor] = []
    for place, anchor in enumerate(anchors):
        try:
            decoded.append(_ANCHORS.decode(anchor, numel))
        except PayloadError as error:
            raise MemberPayloadError(place, error) from None
    return decoded


def _check_finite(values: Tensor) -> None:
    if not is_finite(values):
        raise NonFiniteError("the round would carry the state beyond fp32's range")
