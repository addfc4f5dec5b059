"""Recipes that change the inner loop or the merge, over real agents and real training: lockstep, a kill, a newcomer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.data.packing import PackedTokens
from peer.data.tokenizer import ByteTokenizer
from peer.genesis import build_initial_model
from peer.link.local_anchor import LocalAnchor
from peer.link.memory import SharedState
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec, RunManifest, parse_manifest
from peer.run.local_rule import hook_of
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.task import LanguageTask
from peer.sim.world.scenario import PeerProfile
from peer.train.optim import build_optimizer
from peer.train.replica import ModelReplica
from peer.train.step import Trainer
from tests.network.harness import TestSwarm
from tests.network.members import Member

pytestmark = pytest.mark.timeout(200)
CPU = torch.device("cpu")
INNER = InnerSpec(optimizer="adamw", learning_rate=3e-3, warmup_steps=0, min_learning_rate_ratio=1.0, batch_sequences=4)
STEPS, ROUNDS = 4, 5
RECIPES = {
    "fedprox": "name: fedprox, local: {mu: 2.0}",
    "fedprox-decoupled": "name: fedprox, local: {mu: 20.0, decoupled: true}",
    "easgd": "name: easgd, merge: {a: 0.3}",
    "papa": "name: papa, merge: {alpha: 0.9}",
    "fedglomo": "name: fedglomo",
    "eager-diloco": "name: eager-diloco, outer_momentum: 0.3",
}


def task_of(manifest: RunManifest) -> LanguageTask:
    """Random text; every member has an order of its own."""
    words = np.random.RandomState(5).randint(3, 259, 8 * 64 + 1).astype(np.int32)
    windows = PackedTokens(words, manifest.data.sequence_length)
    return LanguageTask(build_initial_model(manifest, ByteTokenizer()), windows, windows, INNER.batch_sequences, 0)


@dataclass
class TrainedMember(Member):
    """A member with the production trainer on the manifest's model."""

    batches: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    manifest: RunManifest | None = None
    last_step: int = 10**9

    def local(self, memory: SharedState, recipe: Recipe, fragments: Sequence[int]) -> LocalAnchor:
        assert self.manifest is not None
        model = build_initial_model(self.manifest, ByteTokenizer())
        layout, optimizer = FlatLayout.of(model), build_optimizer(model, INNER)
        hook, second = hook_of(recipe.local, model, layout, optimizer, INNER)
        self.trainer = Trainer(model, optimizer, INNER, lambda: INNER.learning_rate, hook=hook)
        self.parameters = ModelReplica(layout, model)
        return LocalAnchor(memory, self.parameters, recipe.optimizer, recipe.late_merge, fragments, hook, second)

    def step(self) -> None:
        assert self.sync is not None
        if self.sync.step < self.last_step:
            self.sync.after_step(self.trainer.step(next(self.batches)))
        else:
            self.sync.poll()


def simulated(manifest: RunManifest, task: LanguageTask) -> tuple[Tensor, list[Tensor]]:
    """The anchor and each peer's parameters after five rounds of three peers."""
    setup = SimulationSetup(
        recipe=RunPlan.of(manifest).recipe, inner=INNER, profiles=(PeerProfile(),) * 3,
        tokens=3 * ROUNDS * STEPS * task.tokens_per_step, seed=0, evaluations=1, partitions=(),
    )  # fmt: skip
    simulation = Simulation(setup, task)
    simulation.run()
    learners = [replica.learner for replica in simulation.replicas if replica.learner is not None]
    return learners[0].outer.anchor, [learner.parameters for learner in learners]


def all_seen(members: Sequence[Member]) -> bool:
    """Each knows of all others that they train."""
    views = [member.swarm.peers.values() for member in members if member.swarm is not None]
    return [sum(record.step > 0 for record in view) for view in views] == [len(members)] * len(members)


def at_end(member: Member) -> bool:
    """It has the last anchor, if it has not merged it yet."""
    return member.head is not None and member.head.round == ROUNDS and not member.in_round


@pytest.mark.parametrize("name", RECIPES)
def test_three_peers_go_the_simulators_way_through_a_kill_and_with_a_newcomer(
    make_swarm: Callable[..., TestSwarm], name: str
) -> None:
    swarm = make_swarm(steps=STEPS, recipe=f"{RECIPES[name]}, aggregator: mean")
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    task = task_of(manifest)
    swarm.kind = partial(TrainedMember, manifest=manifest)
    swarm.bootstrap()
    members = cast("list[TrainedMember]", swarm.add("a", "b", "c"))
    members.sort(key=lambda member: member.peer_id)
    for index, member in enumerate(members):
        member.batches, member.waits, member.last_step = task.batches(index), True, 1
    swarm.drive(lambda: all_seen(members))
    for member in members:
        member.last_step = STEPS * ROUNDS
    swarm.drive(lambda: all(at_end(member) for member in members))
    assert {len(record.members) for member in members for record in member.committed} == {3}, swarm.explain()
    anchor, locals_ = simulated(manifest, task)
    for member, local in zip(members, locals_, strict=True):
        assert member.sync is not None
        if member.sync._held is not None:  # the simulator's peers have merged at its end
            member.sync._take_up(member.sync._held)
        mine = torch.empty_like(local)
        member.parameters.read(mine)
        torch.testing.assert_close(mine, local, rtol=0.0, atol=2e-6)  # a roster's order is that of its members' joins
        torch.testing.assert_close(member.sync.memory.anchor, anchor, rtol=0.0, atol=2e-6)

    for member in members:
        member.waits, member.last_step = False, 10**9
    members.pop().kill()
    swarm.drive(lambda: all(len(member.committed) >= ROUNDS + 2 for member in members))
    (late,) = cast("list[TrainedMember]", swarm.add("late"))
    late.batches = task.batches(3)
    members.append(late)
    swarm.drive(lambda: sum(len(record.members) == 3 for record in late.committed) >= 3)
    assert len(swarm.drive_together(members)) == 1
