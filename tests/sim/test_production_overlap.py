"""Trainers of a swarm that stream fragments, or overlap rounds with steps, go where the simulator's go, to the bit.

The trainers are the production `SwarmSync` over shared memory and outer states; their agents answer in lockstep.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import LocalAnchor
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Snapshot
from peer.link.supervisor import create_descriptor
from peer.link.sync import SwarmSync
from peer.outer.policy.regular import Event, Regular
from peer.outer.recipe.plan import fragments_of
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import Cut, strided_fragments
from peer.outer.state.fragments import Turn
from peer.outer.state.outer_state import OuterState
from peer.sim.campaign.simulation import Simulation
from peer.sim.learner.inner_optimizers import inner_optimizer
from peer.sim.learner.replica import clip_
from tests.link.fakes import LINEAGE, MAPPED, START, FakeAgent, Step
from tests.outer.reference import reduced
from tests.sim.tiny import PUBLISHED, recipe_of, simulate
from tests.sim.tiny_task import BATCH, TinyTask

PEERS, STEPS = 4, 40


class RealPeer:
    """A production trainer whose replica is a tiny model; the order of its flat vector is by fragments."""

    def __init__(self, index: int, recipe: Recipe) -> None:
        self.task = TinyTask()
        layout = self.task.layout
        ranges = strided_fragments(layout.names, layout.shapes, num_fragments=recipe.num_fragments)
        self.order = torch.cat([torch.arange(*one) for fragment in ranges for one in fragment])
        sizes = tuple(sum(stop - start for start, stop in fragment) for fragment in ranges)
        self.local, self.batches = self.task.initial(), self.task.batches(index)
        self.inner = recipe.inner_settings(PUBLISHED)
        self.optimizer = inner_optimizer(str(self.inner.optimizer), layout, self.inner)(self.local)
        self.descriptor, self.agent = create_descriptor(), FakeAgent()
        memory = SharedState(self.descriptor, layout.numel, recipe.optimizer.num_buffers, max(sizes))
        memory.anchor.copy_(self.local[self.order])
        for buffer, value in zip(memory.buffers, recipe.optimizer.initial_values, strict=True):
            buffer.fill_(value)
        shapes = [(size,) for size in sizes]
        fragments = fragments_of(recipe, shapes, sizes, 0)
        self.state = OuterState(memory.anchor, memory.buffers, recipe.optimizer, fragments)
        self.senders = [wire.sender(recipe.feedback) for wire in fragments.wires]
        local = LocalAnchor(memory, self, recipe.optimizer, recipe.late_merge, sizes)
        local.peers = PEERS
        self.sync = SwarmSync(
            AgentConnection(self.agent, START, MAPPED), local, recipe.rounds,
            Limits(rounds_total=None, max_rounds=None), lambda _: None, lambda: 0.0,
        )  # fmt: skip
        self.sync.begin(Anchor(round=0, lineage_id=LINEAGE, contributed=None))

    def read(self, out: Tensor, start: int = 0) -> None:
        out.copy_(self.local[self.order[start : start + len(out)]])

    def write(self, flat: Tensor, start: int = 0) -> None:
        self.local[self.order[start : start + len(flat)]] = flat

    def train(self) -> None:
        gradient = torch.empty_like(self.local)
        self.task.gradient(self.local, next(self.batches), gradient)
        clip_(gradient, self.inner.max_grad_norm)
        self.optimizer.step(gradient, self.inner.learning_rate)


def real_trajectory(recipe: Recipe) -> dict[tuple[int, int], Tensor]:
    """(peer, step) -> its parameters after that step, before what it causes."""
    peers = [RealPeer(index, recipe) for index in range(PEERS)]
    found = {}
    for step in range(1, STEPS + 1):
        for index, peer in enumerate(peers):
            peer.train()
            found[index, step] = peer.local.clone()
            peer.sync.after_step(Step(tokens=BATCH))
        sent = [message for peer in peers for message in peer.agent.take(Snapshot)]
        assert len(sent) in (0, PEERS)
        if sent:
            exchange(peers, [message.tokens for message in sent], sent[0].sequence)
    for peer in peers:
        os.close(peer.descriptor)
    return found


def exchange(peers: list[RealPeer], weights: list[int], sequence: int) -> None:
    """A round, which every agent has done before its trainer's next step."""
    part = peers[0].state.part
    length = part.stop - part.start
    local = [peer.sync.memory.snapshot[:length].clone() for peer in peers]
    update = reduced(peers[0].state, local, weights, senders=[peer.senders[part.index] for peer in peers])
    for peer in peers:
        peer.state.apply(update, peer.state.round + 1, LINEAGE)
        peer.agent.inbox.append(
            Anchor(round=peer.state.round, lineage_id=LINEAGE, contributed=sequence, fragment=part.index)
        )
        if not peer.sync.schedule.overlap_steps:
            peer.sync.poll()


@dataclass(frozen=True, kw_only=True)
class Lengthening(Regular):
    """Round r takes r steps and averages the next fragment: a schedule of which simulator and trainer know nothing."""

    num_fragments: int = 2
    overlap_steps: int = 1

    @property
    def cut(self) -> Cut:
        return Cut(self.num_fragments)

    def begins(self, round: int) -> int:
        return round * (round - 1) // 2

    def longest(self, rounds: int | None) -> int:
        return rounds or STEPS

    def turn(self, round: int) -> Turn:
        return Turn(round % self.num_fragments, round // self.num_fragments)

    def events(self, step: int) -> tuple[Event, ...]:
        number = next(number for number in itertools.count(1) if self.begins(number + 1) >= step)
        return (self.event(number),) if self.begins(number + 1) == step else ()

    def in_words(self) -> str:
        return "after 1, 3, 6, 10, ... steps"


def test_a_schedule_that_neither_knows_runs_through_the_simulator_and_the_trainer() -> None:
    check_same_way(replace(recipe_of("streaming-diloco"), schedule=Lengthening()))


@pytest.mark.parametrize(("name", "overrides"), [
    ("streaming-diloco", {"steps_per_round": 12}),
    ("streaming-diloco", {"schedule": {"period": 9, "num_fragments": 2, "overlap_steps": 3}}),
    ("streaming-diloco", {"schedule": {"period": 6, "overlap_steps": 2}, "merge": "carry", "compressor": "int8"}),
    ("streaming-diloco", {"steps_per_round": 6, "merge": {"alpha": 0.25}, "outer": "fedadam"}),
    ("streaming-diloco", {"schedule": {"period": 9, "num_fragments": 3, "overlap_steps": 4}}),
    ("streaming-diloco", {"schedule": {"period": 6, "num_fragments": 3, "overlap_steps": 6}, "merge": "carry"}),
    ("streaming-diloco", {"schedule": {"period": 8, "num_fragments": 3, "overlap_steps": 7}, "outer": "fedadam"}),
    ("diloco", {"schedule": {"steps": 5, "overlap_steps": 2}}),
    ("diloco", {"schedule": {"name": "timer", "rate": 0.3, "overlap_steps": 2}}),
    ("diloco", {"schedule": {"steps": 5, "overlap_steps": 5}, "compressor": "int8"}),
    ("papa", {"schedule": {"steps": 5, "overlap_steps": 1}}),
    ("eager-diloco", {"steps_per_round": 5}),
    ("eager-diloco", {"steps_per_round": 4, "outer_momentum": 0.3, "compressor": "int8"}),
], ids=str)
def test_trainers_that_overlap_go_where_the_simulators_peers_go(name: str, overrides: dict[str, Any]) -> None:
    check_same_way(recipe_of(name, **overrides))


def check_same_way(recipe: Recipe) -> None:
    simulated: dict[tuple[int, int], Tensor] = {}

    def watch(simulation: Simulation) -> None:
        for index, replica in enumerate(simulation.replicas):
            assert replica.learner is not None
            simulated.setdefault((index, replica.position), replica.learner.parameters.clone())

    simulate(recipe, peers=PEERS, steps=STEPS, inner=PUBLISHED, watch=watch)
    real = real_trajectory(recipe)
    assert all(torch.equal(simulated[place], parameters) for place, parameters in real.items())
    last = [real[index, STEPS] for index in range(PEERS)]
    assert all(not torch.equal(last[0], other) for other in last[1:])
