"""The arithmetic of a gossip round: what a member sends, and what its group's contributions make of its own state.

The same functions of `peer.outer` as in the simulator, in the same order: a round among the same contributions yields
the same state, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from peer.outer.aggregate.base import Mean
from peer.outer.compress.base import NonFiniteError, Payload, is_finite
from peer.outer.compress.identity import Fp32
from peer.outer.math.aggregation import Aggregation
from peer.outer.math.source import Source
from peer.outer.math.step import Decoded
from peer.outer.optim.optimizers import Vectors
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import Drop
from peer.outer.round import RoundAborted
from peer.outer.state.gossip_mixing import drift, mix_, move_, pair_
from peer.outer.state.outer_state import OuterState
from peer.swarm.round.strategy import blamed

_ANCHORS = Fp32()  # anchors are not differences: no coarse codec may touch them


class Mixing:
    """The gossip rounds of one peer that are of one fragment.

    Args:
        state: this peer's own.

    Attributes:
        own: the fragment's part of it, which changes with it.
        acceleration: of the next round, where the recipe has a second iterate.
        slices: [start, stop) of what travels as one frame; a masked vector travels whole.
        sizes: bytes of each frame: the payload, then with payload `delta` the anchor.
    """

    def __init__(self, recipe: Recipe, state: OuterState, fragment: int = 0) -> None:
        self.recipe, self.state, self.fragment, self.wire = recipe, state, fragment, state.fragments.wires[fragment]
        self.bounds = start, stop = state.fragments.bounds[fragment]
        self.own = Vectors(state.anchor[start:stop], [buffer[start:stop] for buffer in state.buffers])
        self._sender = self.wire.sender(recipe.feedback)
        self._deltas, self.acceleration, self._pace = recipe.payload == "delta", Acceleration(), (0, (0.0, 0.0))
        self.slices = self.wire.slices(1, 0) or [(0, self.wire.numel)]
        anchors = [_ANCHORS.wire_bytes(stop - start) if self._deltas else 0 for start, stop in self.slices]
        payloads = [self.wire.codec.wire_bytes(stop - start) for start, stop in self.slices]
        self.sizes = [sum(both) for both in zip(payloads, anchors, strict=True)]

    def turn(self, round: int) -> int:
        """How many rounds this fragment had before that round."""
        return self.state.fragments.at(round - 1).rounds

    def accelerate(self, rounds: int, peers: int) -> None:
        """So many rounds after the last one, among so many peers, the next one begins; see `Acceleration`."""
        if self.recipe.merge.second_iterate:
            if self._pace[0] != peers:  # eigenvalues of a graph of all peers
                self._pace = (peers, self.recipe.acceleration(peers))
            self.acceleration = Acceleration(float(rounds), *self._pace[1])

    def encode(self, index: int, snapshot: Tensor, round: int) -> bytes:
        """One frame of this peer's contribution to a round.

        Raises:
            RoundAborted: the local parameters hold NaN or infinity.
        """
        (start, stop), anchor = self.slices[index], self.own.anchor
        source, own = Source(snapshot[: anchor.numel()], anchor if self._deltas else None), (start, stop)
        if self.recipe.merge.second_iterate:
            source, own = Source(self.acceleration.flow(self.own, snapshot, *own)[0], None), (0, stop - start)
        try:
            payload = self._sender.encode(source, *own, self.turn(round))
        except NonFiniteError as error:
            raise RoundAborted("exchange", str(error)) from None
        return b"".join((payload, _ANCHORS.encode(anchor[start:stop]) if self._deltas else b""))

    def applied(self) -> None:
        """The round of what was encoded last is over: what the codec left out of it is carried to the next."""
        if self._sender.residual is not None:
            self._sender.residual.commit()

    def revert(self) -> None:
        """The round came to nothing."""
        if self._sender.residual is not None:
            self._sender.residual.revert()

    def begin(self, round: int, members: Sequence[str], weights: Sequence[int], me: int, snapshot: Tensor) -> Mixture:
        """What this group's contributions come to.

        Args:
            members, weights: in the order in which all add up.
        """
        return Mixture(self, round, members, weights, me, snapshot)


@dataclass(frozen=True)
class Acceleration:
    """A2CiD2 (arXiv 2306.08289, algorithm 1): what its second iterate does to a peer's parameters.

    Attributes:
        rounds: since the two flowed together last.
        eta: how fast they do.
        alpha_tilde: of the difference between two peers, by which the second one moves.
    """

    rounds: float = 0.0
    eta: float = 0.0
    alpha_tilde: float = 0.0

    def flow(self, state: Vectors, snapshot: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Elements [start, stop) of both iterates, new, once they have flowed together; steps move both alike."""
        x = snapshot[start:stop].clone()
        second = state.buffers[-1][start:stop] + x
        mix_(x, second, self.eta, self.rounds)
        return x, second


class Mixture:
    """One round: frames in, a direction or parameters out; the state changes when `apply` is called, and not before."""

    def __init__(
        self, mixing: Mixing, round: int, members: Sequence[str], weights: Sequence[int], me: int, snapshot: Tensor
    ) -> None:
        recipe, self._mixing, self._own, self._wire = mixing.recipe, mixing, mixing.own, mixing.wire
        self._recipe, self._round, self._turn = recipe, round, mixing.turn(round)
        self._codec = self._wire.codec_at(self._turn)
        self._members, self._me, self._snapshot = members, me, snapshot
        self._deltas, self._lossless = recipe.payload == "delta", recipe.compressor == "fp32"
        self._aggregation = Aggregation(recipe.aggregator, list(weights) if self._deltas else [1] * len(members))
        numel = self._wire.numel
        self._acceleration, self._result = mixing.acceleration, torch.empty(numel)
        self._ahead = torch.empty(numel if recipe.merge.second_iterate else 0)

    def take(self, start: int, stop: int, frames: Sequence[Payload]) -> None:
        """Mix one slice; a frame of each member.

        Raises:
            RoundAborted: a frame is malformed (with its sender), or what it comes to is nothing that can be applied.
        """
        views = [memoryview(frame) for frame in frames]
        size = self._codec.wire_bytes(stop - start)
        payloads, anchors = [view[:size] for view in views], [view[size:] for view in views]
        with blamed(self._members, "contribution"):
            mean, self._aggregation = self._wire.mean(self._aggregation, payloads, start, stop, self._turn)
            self._mix(start, stop, mean, payloads, anchors)

    def _mix(
        self, start: int, stop: int, mean: Tensor, payloads: Sequence[Payload], anchors: Sequence[Payload]
    ) -> None:
        result = self._result[start:stop]
        if self._recipe.merge.second_iterate:
            x, second = self._acceleration.flow(self._own, self._snapshot, start, stop)
            if len(payloads) > 1:
                own, other = (self._codec.decode(payloads[at], stop - start) for at in (self._me, 1 - self._me))
                pair_(x, second, other, self._acceleration.alpha_tilde, None if self._lossless else own)
            result.copy_(x)
            torch.sub(second, x, out=self._ahead[start:stop])
            _check_finite(result)
            _check_finite(self._ahead[start:stop])
            return
        if not self._deltas:
            result.copy_(self._snapshot[start:stop])
            if len(payloads) > 1:  # a peer alone keeps its own
                sent = self._codec.decode(payloads[self._me], stop - start)
                move_(result, mean, sent, replaces=self._lossless)
            _check_finite(result)
            return
        own = self._own.anchor[start:stop]
        if len(anchors) > 1:
            anchors_of_all = [partial(_decoded_anchor, payload) for payload in anchors]
            centre = Aggregation(Mean(), [1.0] * len(anchors), stride=0).aggregate(anchors_of_all, stop - start)
            mean = drift(mean, own, centre)
        result.copy_(mean)
        anchor, buffers = own.clone(), [buffer[start:stop].clone() for buffer in self._own.buffers]
        self._recipe.optimizer.step_(anchor, buffers, result, round=self._turn)
        for tensor in (anchor, *buffers):
            _check_finite(tensor)

    @property
    def cosine(self) -> float | None:
        """The mean between what was contributed."""
        return self._aggregation.cosine

    @property
    def drops(self) -> tuple[Drop, ...]:
        """The members that the aggregator left out."""
        return self._aggregation.drops(self._members)

    def apply(self) -> None:
        """Change the state, in place; every slice has been taken, and its result is finite."""
        state = self._mixing.state
        state.changed(self._mixing.fragment)
        if not self._deltas:
            self._own.anchor.copy_(self._result)
            if self._recipe.merge.second_iterate:
                self._own.buffers[-1].copy_(self._ahead)
            return
        state.carry_on(self._own, Decoded(self._result), *self._mixing.bounds, self._round - 1)


def _decoded_anchor(payload: Payload, start: int, stop: int, room: Tensor | None) -> Tensor:  # noqa: ARG001
    return _ANCHORS.decode(payload, stop - start)


def _check_finite(values: Tensor) -> None:
    if not is_finite(values):
        raise NonFiniteError("the round would carry the state beyond fp32's range")
