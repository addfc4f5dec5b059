"""A swarm in a loop: the production mathematics on a tiny quadratic, no network and no chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peer.outer.aggregate import weighted_mean
from peer.outer.compress.registry import compressor
from peer.outer.fragments import partition
from peer.outer.merge import merge_
from peer.outer.recipes import Recipe
from peer.outer.state import OuterState, Update

MakeInner = Callable[[list[Tensor]], torch.optim.Optimizer]


def start(numel: int) -> Tensor:
    """The initial parameters, fp32 [numel]."""
    return torch.cos(torch.arange(numel, dtype=torch.float32) * 0.7) * 2.0


def gradient(x: Tensor, peer: int, step: int) -> Tensor:
    """Of h/2 (x - target_peer - noise)^2: every element has its curvature h in [.2, 1], every peer its own target."""
    index = torch.arange(x.numel(), dtype=torch.float32)
    curvature = 0.6 + 0.4 * torch.sin(index)
    target = torch.sin(index * 0.3 + peer)
    noise = 0.1 * torch.sin(index + 1.7 * step + 5.0 * peer)
    return curvature * (x - target - noise)


class InnerLoop:
    """One peer's own training on its flat parameters."""

    def __init__(self, peer: int, numel: int, make_inner: MakeInner) -> None:
        self.peer = peer
        self.local = start(numel)
        self.optimizer = make_inner([self.local])
        self.step_count = 0

    def run(self, steps: int) -> None:
        """Take `steps` inner steps."""
        for _ in range(steps):
            self.local.grad = gradient(self.local, self.peer, self.step_count)
            self.optimizer.step()
            self.step_count += 1


class Swarm:
    """Peers that each keep an outer state of their own and exchange nothing but bytes."""

    def __init__(
        self, recipe: Recipe, make_inner: MakeInner, *, peers: int, numel: int, weights: Sequence[float] | None = None
    ) -> None:
        self.recipe = recipe
        self.weights = list(weights or [1.0] * peers)
        self.loops = [InnerLoop(peer, numel, make_inner) for peer in range(peers)]
        self.states = [self._genesis(numel) for _ in range(peers)]

    @property
    def anchor(self) -> Tensor:
        """Peer 0's anchor."""
        return self.states[0].anchor

    def round(self) -> Update:
        """H inner steps everywhere, then one synchronisation in which peer j reduces part j."""
        for loop in self.loops:
            loop.run(self.recipe.steps_per_round)
        update = self.exchange()
        for state, loop in zip(self.states, self.loops, strict=True):
            expected = state.preview(update)
            state.apply(update, state.round + 1, update.digest())
            assert state.digest() == expected
            merge_(loop.local, loop.local.clone(), state.anchor)
        return update

    def exchange(self) -> Update:
        """Contributions of all peers -> the update."""
        codec = self.states[0].compressor
        bounds = partition(self.anchor.numel(), len(self.loops), codec.block)
        sent = [s.encode_contribution(loop.local, bounds) for s, loop in zip(self.states, self.loops, strict=True)]
        parts = []
        for part, (first, last) in enumerate(bounds):
            received = [codec.decode(payloads[part], last - first) for payloads in sent]
            parts.append(codec.encode(weighted_mean(received, self.weights)))
        return Update(tuple(parts), self.anchor.numel(), codec)

    def _genesis(self, numel: int) -> OuterState:
        outer = self.recipe.outer
        buffers = [torch.zeros(numel) for _ in range(outer.num_buffers)]
        return OuterState(start(numel), buffers, outer, compressor(self.recipe.compressor))
