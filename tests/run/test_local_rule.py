"""Local rules in the trainer: the steps of the simulator's peers, what they keep in memory, steps that are skipped."""

from __future__ import annotations

import gc
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.data.packing import PackedTokens
from peer.errors import UserError
from peer.link.second_trajectory import SecondTrajectory
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.run.local_rule import hook_of, rule_bytes, trajectory_of
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.replica import Learner
from peer.sim.learner.task import LanguageTask
from peer.sim.world.scenario import PeerProfile
from peer.train.compute import DEFAULT
from peer.train.memory import Footprint, ModelSize
from peer.train.optim import build_optimizer
from peer.train.replica import ModelReplica
from peer.train.step import Trainer
from tests.sim.tiny import recipe_of
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(optimizer="adamw", learning_rate=3e-3, warmup_steps=0, min_learning_rate_ratio=1.0, max_grad_norm=0.5)
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
RULES: dict[str, dict[str, Any]] = {
    "proximal": {"name": "fedprox", "local": {"mu": 2.0}},
    "decoupled": {"name": "fedprox", "local": {"mu": 20.0, "decoupled": True}},
    "replay": {"name": "fedglomo"},
}


@dataclass
class Production:
    """The trainer of a real peer, and what it trains beside its model."""

    trainer: Trainer
    replica: ModelReplica
    second: SecondTrajectory | None
    numel: int

    def parameters(self) -> Tensor:
        out = torch.empty(self.numel)
        self.replica.read(out)
        return out


def production(recipe: Recipe) -> Production:
    model = tiny_model()
    layout, optimizer = FlatLayout.of(model), build_optimizer(model, INNER)
    hook, again = hook_of(recipe.local, model, layout, optimizer, INNER)
    second = trajectory_of(recipe.local, layout, again, partial(ModelReplica, layout))
    trainer = Trainer(model, optimizer, INNER, lambda: INNER.learning_rate, hook=hook)
    return Production(trainer, ModelReplica(layout, model), second, layout.numel)


def simulated(recipe: Recipe) -> Learner:
    words = np.random.RandomState(5).randint(3, 259, 8 * 64 + 1).astype(np.int32)
    windows = PackedTokens(words, 8)
    setup = SimulationSetup(recipe=recipe, inner=INNER, profiles=(PeerProfile(),), tokens=10**6, seed=0)
    learner = Simulation(setup, LanguageTask(tiny_model(), windows, windows, 4, 0)).replicas[0].learner
    assert learner is not None
    return learner


@pytest.mark.parametrize("name", RULES)
def test_the_steps_of_two_rounds_are_the_simulators(name: str) -> None:
    recipe = recipe_of(**RULES[name])
    peer, learner = production(recipe), simulated(recipe)
    batches, anchor = list(itertools.islice(learner.batches, 8)), learner.outer.anchor
    learner.batches = iter(batches)
    peer.trainer.hook.begin_round(anchor)
    if peer.second is not None:
        peer.second.begin(anchor)
    for half in (batches[:4], batches[4:]):
        for batch in half:
            learner.step(INNER.learning_rate)
            peer.trainer.step(batch)
        torch.testing.assert_close(peer.parameters(), learner.parameters, rtol=0.0, atol=1e-6)
        before, moved = anchor.clone(), (learner.parameters - anchor) / 2
        anchor.add_(moved)
        learner.take_anchor()
        peer.replica.write(anchor)
        if learner.shadow is not None and peer.second is not None:
            second = peer.second.tensors()
            torch.testing.assert_close(second["parameters"], learner.shadow.parameters.in_ram, rtol=0.0, atol=1e-6)
            learner.restart_shadow(before)
            peer.second.subtract(torch.empty_like(anchor))
            peer.second.follow(before, torch.empty_like(anchor), contributed=True)
        peer.trainer.hook.begin_round(anchor)
    plain = simulated(recipe_of("fedavg"))
    plain.batches = iter(batches)
    for _ in range(4):
        plain.step(INNER.learning_rate)
    assert float((plain.parameters - before).abs().max()) > 1e-4, "the rule does something"


@pytest.mark.parametrize("name", RULES)
def test_a_step_that_is_not_finite_moves_nothing_and_leaves_no_trace(name: str) -> None:
    recipe, batches = recipe_of(**RULES[name]), random_batches(4)
    peer, other = production(recipe), production(recipe)
    anchor = torch.full((peer.numel,), 0.01)
    for each in (peer, other):
        each.trainer.hook.begin_round(anchor)
        each.trainer.step(batches[0])
    whole = peer.parameters()
    handle = peer.trainer.model.get_output_embeddings().weight.register_hook(lambda gradient: gradient * math.nan)
    assert peer.trainer.step(batches[1]).skipped
    handle.remove()
    assert torch.equal(peer.parameters(), whole)
    if peer.second is not None:  # its estimate begins again, as at a new anchor
        other.trainer.hook._spider.begin_round()  # type: ignore[attr-defined]
    for each in (peer, other):
        assert not each.trainer.step(batches[2]).skipped
    assert torch.equal(peer.parameters(), other.parameters())


def bytes_alive() -> int:
    """Of all fp32 tensors that Python holds."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter))
    storages = [thing.untyped_storage() for thing in tensors if thing.dtype == torch.float32]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_keeps_is_what_the_fit_check_counts(name: str) -> None:
    recipe = recipe_of(**RULES[name])
    peer = production(recipe)
    peer.trainer.hook.begin_round(peer.parameters())
    for batch in random_batches(2):
        peer.trainer.step(batch)
    alive: list[int] = []
    peer.trainer.model.register_forward_pre_hook(lambda *_: alive.append(bytes_alive()))
    peer.trainer.step(random_batches(3)[2])
    vector = 4 * peer.numel
    del peer
    kept = (max(alive) - bytes_alive()) // vector - 3  # without the parameters and two moments
    counted = sum(rule_bytes(recipe, CUDA)) // 4
    assert kept == {"replay": counted - 1}.get(name, counted)  # while it replays, not yet with the gradient there


def test_the_fit_check_counts_what_a_rule_keeps() -> None:
    million = 1_000_000
    prox, glomo = (rule_bytes(recipe_of(**RULES[name]), CUDA) for name in ("proximal", "replay"))
    assert (prox, glomo, rule_bytes(recipe_of(name="diloco"), CUDA)) == ((4, 0), (40, 12), (0, 0))
    assert rule_bytes(recipe_of(**RULES["proximal"]), CPU) == (0, 0)  # the trainer's copy of the anchor serves
    near, far = (recipe_of(name="streaming-diloco", schedule={"overlap_steps": steps}) for steps in (33, 34))
    assert (rule_bytes(near, CUDA), rule_bytes(far, CUDA)) == ((0, 0), (0, 8))  # fragments that wait, twice
    assert rule_bytes(recipe_of(name="eager-diloco"), CUDA) == (0, 16)
    size = ModelSize(parameters=million, vocab_size=8, hidden_size=8, layers=1)

    def check(device: torch.device, free: dict[torch.device, int]) -> None:
        Footprint.of(size, 0, device, DEFAULT, rule_bytes=glomo).check(device, free.__getitem__)

    slack = 64 * 8  # logits
    check(CUDA, {CUDA: 64 * million + slack, CPU: 32 * million})
    check(CPU, {CPU: 88 * million + slack})
    for free in ({CUDA: 64 * million - 1, CPU: 32 * million}, {CUDA: 65 * million, CPU: 32 * million - 1}):
        with pytest.raises(UserError, match=r"1\.0M parameters needs"):
            check(CUDA, free)
