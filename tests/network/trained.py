"""Members with the production trainer on the manifest's model, and the simulator's way of the same run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peer.data.packing import PackedTokens
from peer.data.tokenizer import ByteTokenizer
from peer.genesis import build_initial_model
from peer.link.local_anchor import InnerParts, LocalAnchor
from peer.link.lockstep import LockstepSync
from peer.link.memory import SharedState
from peer.link.sync import SwarmSync
from peer.outer.policy.moments import Desynced
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec, RunManifest
from peer.run.assemble import rate_of
from peer.run.local_rule import hook_of, trajectory_of
from peer.run.shared_model import moments_of
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.replica import Learner, SimReplica
from peer.sim.learner.task import LanguageTask
from peer.sim.round.contribution import CommittedRound, Contribution
from peer.sim.world.scenario import PeerProfile
from peer.train.compute import Compute
from peer.train.compute_limit import ComputeLimit, micro_batch_of
from peer.train.gradient import KeptGradient
from peer.train.optim import build_optimizer
from peer.train.replica import ModelReplica
from peer.train.step import Trainer
from tests.network.harness import TestSwarm
from tests.network.members import Member

INNER = InnerSpec(
    optimizer="adamw", learning_rate=3e-3, warmup_steps=0, min_learning_rate_ratio=1.0, batch_sequences=4,
    max_grad_norm=1e9,  # a trainer that clips sums the squares in another order than the simulator
)  # fmt: skip


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
        inner = recipe.inner_settings(INNER)
        layout, optimizer = FlatLayout.of(model), build_optimizer(model, inner)
        hook, again = hook_of(recipe.local, model, layout, optimizer, inner)
        second = trajectory_of(recipe.local, layout, again, partial(ModelReplica, layout))
        timeout = recipe.straggler.timeout
        hook.limit = ComputeLimit.of(timeout, model.device, recipe.gradients_per_step)
        compute = Compute(micro_batch=micro_batch_of(timeout, inner.batch_sequences))
        self.trainer = Trainer(model, optimizer, inner, lambda: inner.learning_rate, compute=compute, hook=hook)
        self.parameters = ModelReplica(layout, model)
        moments = moments_of(recipe, model, layout, optimizer, None, 1)
        return LocalAnchor(
            memory, self.parameters, recipe.optimizer, recipe.late_merge, fragments,
            InnerParts(loop=hook, second=second, moments=moments),
        )

    def step(self) -> None:
        assert self.sync is not None
        if self.sync.step < self.last_step:
            self.sync.after_step(self.trainer.step(next(self.batches)))
        else:
            self.sync.poll()


@dataclass
class LockstepMember(TrainedMember):
    """One that makes every step with the others, in a thread of its own."""

    stopping: threading.Event = field(default_factory=threading.Event)

    def local(self, memory: SharedState, recipe: Recipe, fragments: Sequence[int]) -> LocalAnchor:
        assert self.manifest is not None
        model = build_initial_model(self.manifest, ByteTokenizer())
        layout, plan = FlatLayout.of(model), RunPlan.of(self.manifest)
        self.kept = KeptGradient(model, layout, scaled=recipe.accumulates)
        inner = recipe.inner_settings(self.manifest.inner)
        timeout = recipe.straggler.timeout
        self.trainer = Trainer(
            model, self.kept, inner, lambda: rate_of(plan, self.sync, resumed=False)(),
            compute=Compute(micro_batch=micro_batch_of(timeout, inner.batch_sequences)),
        )  # fmt: skip
        self.trainer.hook.limit = ComputeLimit.of(timeout, model.device)
        self.parameters = ModelReplica(layout, model)
        return LocalAnchor(memory, self.parameters, recipe.optimizer, recipe.late_merge, fragments)

    def synchroniser(self, recipe: Recipe, parts: dict[str, Any]) -> SwarmSync:
        parts["limits"] = replace(parts["limits"], stopping=self.stopping.is_set)
        return LockstepSync(self.kept, schedule=recipe.rounds, **parts)


def drive_lockstep(swarm: TestSwarm, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let every member that is not frozen step in its own thread until the condition holds."""
    members = [member for member in swarm.members if isinstance(member, LockstepMember) and not member.frozen]

    def step(member: LockstepMember) -> None:
        torch.set_num_threads(1)  # each thread has a number of its own
        while not member.stopping.wait(0.001):
            member.step()

    threads = [threading.Thread(target=step, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    try:
        while not until():
            assert time.monotonic() < deadline, swarm.explain()
            members[0].stopping.wait(0.02)
    finally:
        for member in members:
            member.stopping.set()
        for thread in threads:
            thread.join()
        for member in members:
            member.stopping.clear()


def simulated(
    manifest: RunManifest, task: LanguageTask, inner: InnerSpec, steps: int, orders: Sequence[Sequence[int]] = (),
    profiles: Sequence[PeerProfile] = (PeerProfile(),) * 3,
) -> list[Learner]:  # fmt: skip
    """Three peers after so many steps each, or on average; `orders`: of the members of each round, if not ascending."""
    setup = SimulationSetup(
        recipe=RunPlan.of(manifest).recipe, inner=inner, profiles=tuple(profiles),
        tokens=3 * steps * task.tokens_per_step, seed=manifest.seed, evaluations=1, partitions=(),
    )  # fmt: skip
    simulation = Simulation(setup, task)
    if orders:
        commit = simulation.sync.commit

        def commit_in_order(
            members: Sequence[SimReplica], sent: Sequence[Contribution], fragment: int, round: int, lr: float
        ) -> CommittedRound:
            order = orders[round - 1]
            return commit([members[place] for place in order], [sent[place] for place in order], fragment, round, lr)

        simulation.sync.commit = commit_in_order  # type: ignore[method-assign]
    simulation.run()
    return [replica.learner for replica in simulation.replicas if replica.learner is not None]


def orders_of(members: Sequence[Member], moments: Desynced | None = None) -> list[list[int]]:
    """The places of the members of each round among these, in the order of its roster; those of moments left out."""
    places = {member.peer_id: place for place, member in enumerate(members)}
    rosters = {record.round: record.members for member in members for record in member.committed}
    numbers = [one for one in sorted(rosters) if moments is None or not moments.turn(one - 1).moments]
    return [[places[peer_id] for peer_id in rosters[number]] for number in numbers]


def all_train(members: Sequence[Member]) -> bool:
    """Each knows of all others that they take part in rounds, if they have made no step yet."""
    views = [member.swarm.peers.values() for member in members if member.swarm is not None]
    return [sum(record.state == "training" for record in view) for view in views] == [len(members)] * len(members)


def all_seen(members: Sequence[Member]) -> bool:
    """Each knows of all others that they train."""
    views = [member.swarm.peers.values() for member in members if member.swarm is not None]
    return [sum(record.step > 0 for record in view) for view in views] == [len(members)] * len(members)
