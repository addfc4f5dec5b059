"""The simulator computes what real peers compute: bytes, updates and states, bit for bit, on every peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peer.outer.compress.residual import Residual
from peer.outer.optim.inner_lr import shared_rate
from peer.outer.policy.schedules import ChangeState, GradientChange
from peer.outer.recipe.plan import wire_format
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.carry import carry_progress_
from peer.outer.state.outer_state import OuterState
from peer.outer.state.wire_format import AnyUpdate
from peer.sim.learner.inner_optimizers import inner_optimizer
from peer.sim.learner.replica import clip_
from tests.outer.reference import gathered, reduced
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
        wire = wire_format(recipe, self.task.layout.shapes, 0)
        optimizer = recipe.optimizer.shaped(self.task.layout.shapes, self.task.layout.hidden)
        self.state = OuterState(self.task.initial(), buffers, optimizer, wire)
        self.sender, self.lost_in_reducing = wire.sender(recipe.feedback), None
        if recipe.feedback is not None and recipe.exchange == "reduce":
            self.lost_in_reducing = Residual(recipe.feedback.on_return, self.local.numel())

    def train(self, steps: int = STEPS) -> float:
        """The gradient's norm at the last step."""
        gradient, norm = torch.empty_like(self.local), 0.0
        for _ in range(steps):
            self.task.gradient(self.local, next(self.batches), gradient)
            norm = float(gradient.norm())
            clip_(gradient, self.inner.max_grad_norm)
            self.optimizer.step(gradient, self.inner.learning_rate)
        return norm

    def settle(self) -> None:
        """The round that this peer contributed to is committed."""
        for residual in (self.sender.residual, self.lost_in_reducing):
            if residual is not None:
                residual.commit()

    def commit(self, update: AnyUpdate) -> str:
        self.state.check(update)
        self.state.apply(update, self.state.round + 1, update.digest())
        carry_progress_(self.local, self.local.clone(), self.state.anchor)
        return self.state.digest()


def gathering_swarm(recipe: Recipe, rounds: int) -> Tensor:
    """The anchor."""
    peers = [RealPeer(index, recipe) for index in range(PEERS)]
    for _ in range(rounds):
        for peer in peers:
            peer.train()
        weights = [STEPS * BATCH] * PEERS
        stored = gathered(peers[0].state, [peer.sender for peer in peers], [peer.local for peer in peers], weights)
        for peer in peers:
            peer.settle()
        updates = [peer.state.split_update(stored.payload, weights) for peer in peers]
        assert len({peer.commit(update) for peer, update in zip(peers, updates, strict=True)}) == 1
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
    update = reduced(
        peers[0].state, [peer.local for peer in peers], [STEPS * BATCH] * PEERS, recipe.aggregator,
        [peer.sender for peer in peers], [peer.lost_in_reducing for peer in peers],
    )  # fmt: skip
    for peer in peers:
        peer.settle()
    assert len({peer.commit(update) for peer in peers}) == 1


@pytest.mark.parametrize(("name", "overrides"), [
    ("fedavg", {}), ("fedadam", {}), ("fedadagrad", {}), ("fedyogi", {}), ("diloco", {}), ("opendiloco", {}),
    ("muloco", {}), ("lagoon", {}), ("diloco", {"aggregator": "trimmed", "compressor": "bf16"}),
    ("fedavg", {"compressor": "sign", "feedback": {"name": "error-feedback", "decay": 0.9, "gain": 2.0}}),
    ("diloco", {"outer": {"name": "delayed-nesterov", "lr": 0.5, "momentum": 0.9, "every": 2}, "compressor": "int4"}),
    ("pier", {"compressor": "int8"}), ("restarted-diloco", {"compressor": "int8"}),
    ("snoo", {}), ("lagoon", {"interpolation": 0.5}), ("heloco", {"straggler": "wait", "compressor": "int8"}),
    ("lagoon", {"outer_schedule": {"decay_from": 0.3, "final_lr": 0.2, "restart": 2}}),
], ids=str)
def test_the_simulator_ends_where_real_peers_end(name: str, overrides: dict[str, Any]) -> None:
    rounds = 6
    recipe = recipe_of(name, steps_per_round=STEPS, **overrides).lasting(rounds)
    run = simulate(recipe, peers=PEERS, steps=rounds * STEPS, inner=PUBLISHED)
    anchor, result = real_swarm(recipe, rounds)
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, anchor)
    assert torch.equal(run.consensus, result)


@pytest.mark.parametrize(("name", "overrides"), [
    ("sparseloco", {}), ("covenant", {}), ("sparseloco", {"aggregator": "gated"}),
    ("edit", {"exchange": "gather", "aggregator": {"temperature": 0.1, "max_norm": 0.5}}),
    ("sparseloco", {"outer": "diloco"}),
    ("diloco", {"exchange": "gather", "compressor": "int8"}),
    ("diloco", {"exchange": "gather", "compressor": "random0.25+fp32", "feedback": "sparseloco"}),
    ("diloco", {"exchange": "gather", "compressor": "dct8+top4/64+int4", "feedback": "sparseloco"}),
], ids=str)
def test_the_simulator_ends_where_peers_end_that_gather_payloads(name: str, overrides: dict[str, Any]) -> None:
    rounds = 6
    recipe = recipe_of(name, steps_per_round=STEPS, **overrides).lasting(rounds)
    run = simulate(recipe, peers=PEERS, steps=rounds * STEPS, inner=PUBLISHED)
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, gathering_swarm(recipe, rounds))


@pytest.mark.parametrize(("name", "optimizer", "overrides"), [
    ("demo", None, {}), ("demo", None, {"compressor": "int8", "exchange": "gather", "feedback": "none"}),
    ("ddp", "adamw", {}), ("ddp", "sgd", {}), ("ddp", "muon", {}), ("ddp", "adamw", {"compressor": "int8"}),
    ("gpa", "adamw", {}), ("gpa", "muon", {}), ("distro", None, {}),
    ("sparse-block", None, {}),
], ids=str)
def test_the_simulator_ends_where_peers_end_that_make_every_step_together(
    name: str, optimizer: str | None, overrides: dict[str, Any]
) -> None:
    inner, rounds = PUBLISHED.model_copy(update={"optimizer": optimizer}), 12
    recipe = recipe_of(name, **overrides).with_inner(inner)
    run = simulate(recipe, peers=PEERS, steps=rounds, inner=inner)
    peers = [RealPeer(index, recipe) for index in range(PEERS)]
    rate, gradient = shared_rate(inner, rounds), torch.empty_like(peers[0].local)
    for number in range(rounds):
        scaled = []
        for peer in peers:
            peer.state.rate = rate
            peer.task.gradient(peer.local, next(peer.batches), gradient)
            if not recipe.clips_mean:
                clip_(gradient, peer.inner.max_grad_norm)
            scaled.append(gradient * (rate(number) if recipe.accumulates else 1.0))
        if recipe.exchange == "gather":
            update = gathered(peers[0].state, [peer.sender for peer in peers], scaled, [BATCH] * PEERS)
        else:
            update = reduced(peers[0].state, scaled, [BATCH] * PEERS)
        for peer in peers:
            peer.settle()
        before = peers[0].state.anchor.clone()
        digests = {peer.commit(update) for peer in peers}
        assert len(digests) == 1
        for peer in peers:
            peer.local.copy_(before if recipe.overlap_steps else peer.state.anchor)
    learner = run.simulation.replicas[0].learner
    assert learner is not None
    assert torch.equal(learner.outer.anchor, peers[0].state.anchor)
    assert all(map(torch.equal, learner.outer.buffers, peers[0].state.buffers))


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
