"""Rounds that begin with a quorum, over real agents: no peer waits for the slowest, whose work counts later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec, RunManifest, parse_manifest
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.world.scenario import PeerProfile
from tests.network.harness import TestSwarm
from tests.network.members import TOKENS_PER_STEP, Member

MakeSwarm = Callable[..., TestSwarm]
pytestmark = pytest.mark.timeout(400)
STEPS, WINDOW_S, GRACE_S = 3, 30.0, 2.0
SGD = InnerSpec(optimizer="sgd", learning_rate=1.0, warmup_steps=0, min_learning_rate_ratio=1.0, max_grad_norm=1e9)


@dataclass
class PacedMember(Member):
    """Makes so many steps and no more."""

    last_step: int = 0

    def step(self) -> None:
        assert self.sync is not None
        if self.sync.step < self.last_step:
            super().step()
        else:
            self.sync.poll()


class Pushed:
    """A `Task` whose every step moves all parameters of a peer by its own amount."""

    tokens_per_step, device = TOKENS_PER_STEP, torch.device("cpu")

    def __init__(self, initial: Tensor, pushes: list[float]) -> None:
        numel = initial.numel()
        self.layout = FlatLayout(names=("w",), shapes=((numel,),), offsets=(0,), numel=numel)
        self._initial, self._pushes = initial, pushes

    def initial(self) -> Tensor:
        return self._initial.clone()

    def batches(self, peer: int) -> Iterator[Tensor]:
        while True:
            yield torch.tensor([self._pushes[peer]])

    def gradient(self, parameters: Tensor, batch: Tensor, out: Tensor) -> float:  # noqa: ARG002
        out.fill_(-float(batch[0]))
        return 1.0

    def validate(self, parameters: Tensor, *, final: bool) -> float:  # noqa: ARG002
        return 1.0


def simulated(manifest: RunManifest, task: Pushed) -> Tensor:
    """The anchor after six rounds, of which the slow third peer is in the third and the sixth."""
    setup = SimulationSetup(
        recipe=RunPlan.of(manifest).recipe, inner=SGD, tokens=TOKENS_PER_STEP * STEPS * (6 + 6 + 2),
        profiles=(PeerProfile(), PeerProfile(), PeerProfile(speed=0.27)), evaluations=1,
    )  # fmt: skip
    simulation = Simulation(setup, task)
    simulation.run()
    assert simulation.replicas[0].base_round == 6
    learner = simulation.replicas[0].learner
    assert learner is not None
    return learner.outer.anchor


def by_rank(members: list[Member]) -> list[Member]:
    """The first leads, as `Membership` ranks peers."""
    return sorted(members, key=lambda one: hashlib.sha256(f"{one.run_id} leads {one.peer_id}".encode()).digest())


def test_rounds_of_a_quorum_are_the_simulators_and_digests_are_equal_through_a_kill_and_a_late_join(
    make_swarm: MakeSwarm,
) -> None:
    recipe = f"name: async-diloco, compressor: int8, straggler: {{grace_s: {GRACE_S}}}, aggregator: mean"
    swarm = make_swarm(steps=STEPS, wait=WINDOW_S, recipe=recipe)
    swarm.kind = PacedMember
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    bootstrap = swarm.bootstrap()
    a, b, slow = members = by_rank(swarm.add("a", "b", "c"))
    for member in members:
        member.waits = True
    for number in range(1, 7):
        if number % 3 == 0:  # the slow one comes first, and waits for the quorum
            slow.last_step += STEPS
            swarm.drive(lambda: slow.in_round)
        a.last_step += STEPS
        b.last_step += STEPS
        swarm.drive(lambda due=number: all(one.round == due for one in members))
    swarm.drive(lambda: len(a.committed) == 6)
    assert [slow.peer_id in record.members for record in a.committed] == [False, False, True] * 2, swarm.explain()
    stale = [dict(zip(one.members, one.weights, strict=True))[slow.peer_id] for one in a.committed[2::3]]
    assert stale == [round(TOKENS_PER_STEP * STEPS / 3**0.5)] * 2  # two rounds were made without it
    numel = a.sync.memory.anchor.numel()
    task = Pushed(bootstrap.genesis()[:numel], [float(member.push) for member in members])
    torch.testing.assert_close(a.sync.memory.anchor, simulated(manifest, task), rtol=0.0, atol=1e-5)

    for member in members:
        member.last_step, member.waits = 10**9, False
    b.kill()
    (late,) = swarm.add("late")
    late.last_step, goal = 10**9, a.round + 3
    others = [a, slow, late]
    digests = swarm.drive_together(others, lambda: a.round >= goal and len(late.committed) >= 1, 90.0)
    assert len(digests) == 1
    assert torch.equal(a.sync.memory.anchor, late.sync.memory.anchor)


@pytest.mark.long
def test_fragments_go_on_without_the_slowest_and_take_its_work_later(make_swarm: MakeSwarm) -> None:
    schedule = "schedule: {name: strided, period: 8, num_fragments: 2}"
    recipe = f"name: async-diloco, compressor: int8, straggler: {{grace_s: 0.5}}, {schedule}"
    swarm = make_swarm(steps=8, wait=WINDOW_S, recipe=recipe, layers=2)
    swarm.bootstrap()
    a, b, slow = members = by_rank(swarm.add("a", "b", "c"))
    a.pace = b.pace = 5
    slow.pace = 10**6  # it makes no step

    def without() -> int:
        return sum(slow.peer_id not in record.members for record in a.committed)

    swarm.drive(lambda: without() >= 5, 90.0)
    assert max(record.seconds["total"] for record in a.committed[-3:]) < WINDOW_S / 3
    slow.pace, before = 5, len(slow.committed)
    swarm.drive(lambda: len(slow.committed) >= before + 2, 90.0)
    weights = [dict(zip(one.members, one.weights, strict=True))[slow.peer_id] for one in slow.committed]
    assert weights[-1] >= TOKENS_PER_STEP
    assert len(swarm.drive_together(members, timeout_s=60.0)) == 1

    b.kill()
    (late,) = swarm.add("late")
    late.pace, goal, others = 5, a.round + 10, [a, slow, late]  # five rounds of each fragment
    digests = swarm.drive_together(others, lambda: a.round >= goal and len(late.committed) >= 2, 120.0)
    assert len(digests) == 1
    assert all(torch.equal(a.sync.memory.anchor, other.sync.memory.anchor) for other in others)
