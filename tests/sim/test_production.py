"""The simulator computes what real peers compute: bytes, updates and states, bit for bit, on every peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peer.outer.aggregate.reduce import reduce_shard
from peer.outer.compress.feedback import Encoder
from peer.outer.compress.registry import compressor
from peer.outer.compress.residual import DeferredResidual, Residual
from peer.outer.optim.inner_lr import shared_rate
from peer.outer.policy.schedules import ChangeState, GradientChange
from peer.outer.recipe.recipe import Recipe
from peer.outer.recipe.resolve import wire_format
from peer.outer.state.carry import carry_progress_
from peer.outer.state.flat_layout import shards_of
from peer.outer.state.gathered_update import GatherFormat
from peer.outer.state.outer_state import AnyUpdate, OuterState
from peer.outer.state.reduced_update import Update
from peer.sim.learner.inner_optimizers import inner_optimizer
from peer.sim.learner.replica import clip_
from tests.sim.tiny import PUBLISHED, recipe_of, simulate
from tests.sim.tiny_task import BATCH, TinyTask

PEERS, STEPS = 4, 5


class RealPeer:
    """What one peer of a swarm holds; it gives and takes nothing but bytes."""

    def __init__(self, index: int, recipe: Recipe) -> None:
        self.task = TinyTask()
        self.local, self.batches = self.task.initial(), self.task.batches(index)
        self.inner = recipe.inner_settings(PUBLISHED)
        self.optimizer = inner_optimizer(str(self.inner.optimizer), self.task.layout, self.inner)(self.local)
        buffers = [torch.full_like(self.local, value) for value in recipe.optimizer.initial_values]
        written = compressor(recipe.compressor) if recipe.exchange == "reduce" else gathering_of(recipe, self.task)
        self.state = OuterState(self.task.initial(), buffers, recipe.optimizer, written)
        feedback, numel = recipe.feedback, self.local.numel()
        self.encoder = Encoder(written.codec, feedback, numel) if isinstance(written, GatherFormat) else None
        self.lost = None if feedback is None else DeferredResidual(feedback, numel)
        self.lost_in_reducing = None if feedback is None else Residual(feedback.on_return, numel)

    def train(self, steps: int = STEPS) -> float:
        """The gradient's norm at the last step."""
        gradient, norm = torch.empty_like(self.local), 0.0
        for _ in range(steps):
            self.task.gradient(self.local, next(self.batches), gradient)
            norm = float(gradient.norm())
            clip_(gradient, self.inner.max_grad_norm)
            self.optimizer.step(gradient, self.inner.learning_rate)
        return norm

    def reduce(self, payloads: list[bytes], start: int, stop: int, recipe: Recipe) -> bytes:
        codec, lost = self.state.compressor, self.lost_in_reducing
        encode = None if lost is None else lambda n, read: lost.encode(codec, start, start + n, read)
        weights = [STEPS * BATCH] * PEERS
        return reduce_shard(payloads, weights, stop - start, codec, recipe.aggregator, encode)[0]

    def commit(self, update: AnyUpdate) -> str:
        self.state.check(update)
        for residual in (self.lost, self.lost_in_reducing, self.encoder):
            if residual is not None:
                residual.commit()
        self.state.apply(update, self.state.round + 1, update.digest())
        carry_progress_(self.local, self.local.clone(), self.state.anchor)
        return self.state.digest()


def gathering_of(recipe: Recipe, task: TinyTask) -> GatherFormat:
    written = wire_format(recipe, task.layout.shapes, 0)
    assert isinstance(written, GatherFormat)
    return written


def gathering_swarm(recipe: Recipe, rounds: int) -> Tensor:
    """The anchor."""
    peers = [RealPeer(index, recipe) for index in range(PEERS)]
    for _ in range(rounds):
        for peer in peers:
            peer.train()
        sent = [peer.state.encode_whole(peer.local, peer.encoder) for peer in peers if peer.encoder is not None]
        parts = [one.payload for one in sent]
        weights = [STEPS * BATCH] * PEERS
        stored = peers[0].state.update_of(parts, weights).payload
        assert len({peer.commit(peer.state.split_update(stored, weights)) for peer in peers}) == 1
    return peers[0].state.anchor


def real_swarm(recipe: Recipe, rounds: int) -> tuple[Tensor, Tensor]:
    """The anchor and what the run yields."""
    peers = [RealPeer(index, recipe) for index in range(PEERS)]
    for _ in range(rounds):
        for peer in peers:
            peer.train()
        reduced_round(peers, recipe)
    return peers[0].state.anchor, peers[0].state.result


def reduced_round(peers: list[RealPeer], recipe: Recipe) -> None:
    """Of what all have trained."""
    numel, codec = peers[0].local.numel(), peers[0].state.compressor
    bounds = shards_of(numel, PEERS, codec.block)
    sent = [peer.state.encode_contribution(peer.local, bounds, peer.lost) for peer in peers]
    parts = tuple(
        peers[owner].reduce([payloads[owner] for payloads in sent], start, stop, recipe)
        for owner, (start, stop) in enumerate(bounds)
    )
    update = Update(parts, numel, codec)
    assert len({peer.commit(update) for peer in peers}) == 1


@pytest.mark.parametrize(("name", "overrides"), [
    ("fedavg", {}), ("fedadam", {}), ("fedadagrad", {}), ("fedyogi", {}), ("diloco", {}), ("opendiloco", {}),
    ("muloco", {}), ("lagoon", {}), ("diloco", {"aggregator": "trimmed", "compressor": "bf16"}),
    ("fedavg", {"compressor": "sign", "feedback": {"name": "error-feedback", "decay": 0.9, "gain": 2.0}}),
    ("diloco", {"outer": {"name": "delayed-nesterov", "lr": 0.5, "momentum": 0.9, "every": 2}, "compressor": "int4"}),
], ids=str)
def test_the_simulator_ends_where_real_peers_end(name: str, overrides: dict[str, Any]) -> None:
    recipe = recipe_of(name, steps_per_round=STEPS, **overrides)
    rounds = 6
    run = simulate(recipe, peers=PEERS, steps=rounds * STEPS, inner=PUBLISHED)
    anchor, result = real_swarm(recipe, rounds)
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, anchor)
    assert torch.equal(run.consensus, result)


@pytest.mark.parametrize(("name", "overrides"), [
    ("sparseloco", {}), ("sparseloco", {"aggregator": "gated"}), ("sparseloco", {"outer": "diloco"}),
    ("diloco", {"exchange": "gather", "compressor": "int8"}),
    ("diloco", {"exchange": "gather", "compressor": "random0.25+fp32", "feedback": "sparseloco"}),
    ("diloco", {"exchange": "gather", "compressor": "dct8+top4/64+int4", "feedback": "sparseloco"}),
], ids=str)
def test_the_simulator_ends_where_peers_end_that_gather_payloads(name: str, overrides: dict[str, Any]) -> None:
    recipe = recipe_of(name, steps_per_round=STEPS, **overrides)
    rounds = 6
    run = simulate(recipe, peers=PEERS, steps=rounds * STEPS, inner=PUBLISHED)
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, gathering_swarm(recipe, rounds))


@pytest.mark.parametrize("overrides", [{}, {"compressor": "int8", "exchange": "gather", "feedback": "none"}], ids=str)
def test_the_simulator_ends_where_peers_end_that_make_every_step_together(overrides: dict[str, Any]) -> None:
    recipe, rounds = recipe_of("demo", **overrides), 12
    run = simulate(recipe, peers=PEERS, steps=rounds, inner=PUBLISHED)
    peers = [RealPeer(index, recipe) for index in range(PEERS)]
    rate = shared_rate(peers[0].inner, rounds)
    gradient = torch.empty_like(peers[0].local)
    for number in range(rounds):
        parts = []
        for peer in peers:
            assert peer.encoder is not None
            peer.state.rate = rate
            peer.task.gradient(peer.local, next(peer.batches), gradient)
            scaled = gradient * rate(number)
            clip_(scaled, peer.inner.max_grad_norm * rate(number))
            parts.append(peer.state.encode_whole(scaled, peer.encoder).payload)
        update = peers[0].state.update_of(parts, [BATCH] * PEERS)
        digests = {peer.commit(update) for peer in peers}
        assert len(digests) == 1
        for peer in peers:
            peer.local.copy_(peer.state.anchor)
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, peers[0].state.anchor)


def test_the_simulator_ends_where_peers_end_that_call_for_rounds() -> None:
    recipe, steps = recipe_of("selsync", schedule={"delta": 0.05, "smoothing": 5}), 40
    run = simulate(recipe, peers=PEERS, steps=steps, inner=PUBLISHED)
    votes = recipe.schedule
    assert isinstance(votes, GradientChange)
    peers, states, rounds = [RealPeer(index, recipe) for index in range(PEERS)], [ChangeState()] * PEERS, 0
    for step in range(steps):
        wanted = step == steps - 1  # at the end the simulator averages anyway
        for index, peer in enumerate(peers):
            states[index], voted = votes.vote(states[index], peer.train(steps=1))
            wanted = wanted or voted
        if wanted:
            rounds += 1
            reduced_round(peers, recipe)
    assert 5 < rounds < steps
    assert rounds == run.result.tally.committed
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, peers[0].state.anchor)


def test_int8_ends_near_fp32() -> None:
    ends = [simulate("diloco", steps=40, steps_per_round=5, compressor=codec).consensus for codec in ("fp32", "int8")]
    error = (ends[0] - ends[1]).norm() / (ends[0] - TinyTask().initial()).norm()
    assert 0.0 < error < 0.02
