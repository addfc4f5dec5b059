"""Rounds without the slowest members, over real agents: who misses one keeps its parameters, and brings them later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.link.messages import Anchor, Message
from peer.link.sync import SwarmSync
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.world.scenario import PeerProfile
from tests.network.harness import TestSwarm
from tests.network.members import TOKENS_PER_STEP, Member
from tests.network.test_quorum import SGD, PacedMember, Pushed
from tests.network.trained import all_train

MakeSwarm = Callable[..., TestSwarm]
pytestmark = pytest.mark.timeout(200)
WINDOW, ENDLESS = 3, 10**9


class NotedSync(SwarmSync):
    """Notes after how many steps it handed a contribution over."""

    handed_step = 0

    def _hand_over(self) -> None:
        self.handed_step = self.step  # no step is made until the round is over
        super()._hand_over()


@dataclass
class Noted(PacedMember):
    """Notes what it has after each anchor, and how many steps it had contributed by then."""

    after: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def synchroniser(self, recipe: Recipe, parts: dict[str, Any]) -> SwarmSync:
        return NotedSync(schedule=recipe.rounds, **parts)

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if isinstance(message, Anchor) and isinstance(self.sync, NotedSync) and self.replica is not None:
            self.after[message.round] = (self.sync.handed_step, self.replica.flat.clone())


def by_rank(members: list[Member]) -> list[Noted]:
    """The first leads, as `Membership` ranks peers."""
    ranked = sorted(members, key=lambda one: hashlib.sha256(f"{one.run_id} leads {one.peer_id}".encode()).digest())
    return [member for member in ranked if isinstance(member, Noted)]


def connected(rosters: list[tuple[str, ...]]) -> int:
    """How many peers these rounds connect with the first."""
    reached = {rosters[0][0]}
    for _ in rosters:
        for roster in rosters:
            reached |= set(roster) if reached & set(roster) else set()
    return len(reached)


@pytest.mark.long
def test_rounds_go_on_without_the_slowest_as_in_the_simulator_through_a_kill_and_with_a_late_join(
    make_swarm: MakeSwarm,
) -> None:
    recipe = f"name: dybw, aggregator: mean, straggler: {{window: {WINDOW}}}"
    swarm = make_swarm(steps=1, wait=20.0, recipe=recipe)
    swarm.kind = Noted
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    bootstrap = swarm.bootstrap()
    a, b, slow = members = by_rank(swarm.add("a", "b", "c"))
    swarm.drive(lambda: all_train(members))  # a round waits for no peer that its leader has not seen
    for member in members:
        member.waits, member.last_step = True, ENDLESS
    slow.pace = 50

    def rosters_of() -> dict[int, tuple[str, ...]]:
        return {record.round: record.members for member in members for record in member.committed}

    swarm.drive(lambda: len(rosters_of()) == max(a.round, max(rosters_of(), default=0)) >= 3 * WINDOW, 90.0)
    rosters = rosters_of()
    last = max(rosters)
    sizes = [len(rosters[number]) for number in range(1, last + 1)]
    assert 2 in sizes
    windows = [range(first, first + WINDOW) for first in range(1, last - WINDOW + 2, WINDOW)]
    assert len(windows) >= 3
    for window in windows:
        assert connected([rosters[number] for number in window]) == 3, sizes
    numel = a.sync.memory.anchor.numel()
    task = Pushed(bootstrap.genesis()[:numel], [float(member.push) for member in members])
    check_against_simulator(manifest, members, rosters, task)

    for member in members:
        member.waits = False
    slow.pace = 20
    b.kill()
    (late,) = swarm.add("late")
    late.last_step, goal, others = ENDLESS, a.round + 2 * WINDOW, [a, slow, late]
    swarm.drive(lambda: a.round >= goal and len(late.committed) >= 1, 90.0)
    for member in others:  # rounds go on without the slowest: it has the others' state for good once no more are made
        member.last_step = 0
    digests = swarm.drive_together(others, timeout_s=90.0)
    assert len(digests) == 1
    assert torch.equal(a.sync.memory.anchor, late.sync.memory.anchor)


def check_against_simulator(
    manifest: RunManifest, members: list[Noted], rosters: dict[int, tuple[str, ...]], task: Pushed
) -> None:
    """The simulator's peers make the same steps and the same rounds, and have the same parameters after each."""
    recipe = RunPlan.of(manifest).recipe
    setup = SimulationSetup(recipe=recipe, inner=SGD, profiles=(PeerProfile(),) * 3, tokens=1, evaluations=1)
    simulation, made = Simulation(setup, task), [0, 0, 0]
    for number in sorted(rosters):
        places = [i for i, member in enumerate(members) if member.peer_id in rosters[number]]
        seen = {i: members[i].after[number] for i in places if number in members[i].after}
        if len(seen) < len(places) or number > 10:
            break  # a trainer has not merged it yet; or a member has passed probation, and others weigh less
        replicas = [simulation.replicas[i] for i in places]
        for i, replica in zip(places, replicas, strict=True):
            assert replica.learner is not None
            replica.learner.parameters.add_(members[i].push * (seen[i][0] - made[i]))
            made[i], replica.unsent_tokens[0] = seen[i][0], TOKENS_PER_STEP
        sent = [simulation.sync.contribute(replica, 0, number, 1.0, overlapped=False) for replica in replicas]
        simulation.sync.commit(replicas, sent, 0, number, 1.0)
        for i, replica in zip(places, replicas, strict=True):
            torch.testing.assert_close(seen[i][1], replica.learner.parameters, rtol=0.0, atol=1e-5)
    assert number >= 5
