"""Recipes of rounds of many steps, over real agents and real training: lockstep, a kill, a newcomer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch

from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.sim.learner.task import LanguageTask
from peer.sim.world.scenario import PeerProfile
from tests.network.harness import TestSwarm
from tests.network.members import Member
from tests.network.trained import INNER, TrainedMember, all_seen, orders_of, simulated, task_of

pytestmark = pytest.mark.timeout(200)
STEPS, ROUNDS = 4, 5
RECIPES = {
    "fedprox": "name: fedprox, local: {mu: 2.0}",
    "fedprox-decoupled": "name: fedprox, local: {mu: 20.0, decoupled: true}",
    "easgd": "name: easgd, merge: {a: 0.3}",
    "papa": "name: papa, merge: {alpha: 0.9}",
    "fedglomo": "name: fedglomo",
    "eager-diloco": "name: eager-diloco, outer_momentum: 0.3",
    "paba": "name: paba",
    "covenant": "name: covenant, compressor: top4096/4096+fp32, aggregator: {factor: 1.0}",
    "edit": "name: edit, exchange: gather, aggregator: {temperature: 0.01, max_norm: 0.2}",
    "heloco": "name: heloco, straggler: wait",
    "palsgd": "name: palsgd, local: {p: 0.5, eta: 40.0}",
    "pier": "name: pier, outer_schedule: {restart: 3}",
    "fedadagrad": "name: fedadagrad",
    "fedadam": "name: fedadam",
    "fedyogi": "name: fedyogi",
    "opendiloco": "name: opendiloco",
    "intellect1": "name: intellect1",
    "muloco": "name: muloco",
    "lagoon": "name: lagoon",
    "fedavg": "name: fedavg",
    "diloco": "name: diloco",
    "sparseloco": "name: sparseloco",
    "snoo": "name: snoo",
    "restarted-diloco": "name: restarted-diloco",
    "des-loc": "name: des-loc, moments: {first: 2, second: 3}",
    "time-limit": "name: diloco, straggler: {name: compute-timeout, tau_s: 1.0e-9}",  # one micro-batch is in time
    "time-limit-fixed": "name: fedglomo, straggler: {name: compute-timeout, tau_s: 1.0e-9, normalise: fixed}",
}
LASTING = {"covenant": 30, "pier": 30}  # rounds; no other needs to know how many
SPEEDS = {"paba": {1.0: 5, 0.4: 2}}  # and the steps of a peer that is as fast, beside two of speed 1


def at_end(member: Member, links: int) -> bool:
    """It has the last anchor, if it has not merged it yet."""
    head = member.head  # the agent may be about to change it
    return head is not None and head.round == member.recorded == links and not member.in_round


@pytest.mark.parametrize("name", [  # the others see the same parts of a peer
    name if name == "eager-diloco" else pytest.param(name, marks=pytest.mark.long)
    for name in RECIPES
])  # fmt: skip
def test_three_peers_go_the_simulators_way_through_a_kill_and_with_a_newcomer(
    make_swarm: Callable[..., TestSwarm], name: str
) -> None:
    aggregator = "" if "aggregator" in RECIPES[name] else ", aggregator: mean"
    swarm = make_swarm(steps=STEPS, recipe=RECIPES[name] + aggregator, total=LASTING.get(name))
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    task = task_of(manifest)
    swarm.kind, swarm.shapes = partial(TrainedMember, manifest=manifest), task.layout.shapes
    swarm.bootstrap()
    members = cast("list[TrainedMember]", swarm.add("a", "b", "c"))
    members.sort(key=lambda member: member.peer_id)
    speeds = [1.0, 1.0, min(SPEEDS.get(name, {1.0: STEPS}))]
    steps = [SPEEDS.get(name, {1.0: STEPS})[speed] for speed in speeds]
    for index, member in enumerate(members):
        member.batches, member.waits, member.last_step = task.batches(index), True, 1
        if name in SPEEDS:
            member.sync._allotted = steps[index]  # from the first round on; then the agents say so
    swarm.drive(lambda: all_seen(members))
    for member, own in zip(members, steps, strict=True):
        member.last_step = own * ROUNDS
    moments = RunPlan.of(manifest).recipe.moments
    links = ROUNDS if moments is None else moments.links(ROUNDS)
    swarm.drive(lambda: all(at_end(member, links) for member in members))
    assert {len(record.members) for member in members for record in member.committed} == {3}, swarm.explain()
    check_against_simulator(manifest, task, members, steps, speeds)

    for member in members:
        member.waits, member.last_step = False, 10**9
    members.pop().kill()
    swarm.drive(lambda: all(len(member.committed) >= links + 2 for member in members))
    (late,) = cast("list[TrainedMember]", swarm.add("late"))
    late.batches = task.batches(3)
    members.append(late)
    swarm.drive(lambda: sum(len(record.members) == 3 for record in late.committed) >= 3)
    assert len(swarm.drive_together(members)) == 1


def check_against_simulator(
    manifest: RunManifest, task: LanguageTask, members: list[TrainedMember], steps: list[int], speeds: list[float]
) -> None:
    """Local parameters and anchor are those of the simulator's peers."""
    profiles = [PeerProfile(speed=speed) for speed in speeds]
    orders = orders_of(members, RunPlan.of(manifest).recipe.moments)
    learners = simulated(manifest, task, INNER, STEPS * ROUNDS, orders, profiles)
    assert sum(steps) == STEPS * len(members)
    anchor = learners[0].outer.anchor
    for member, local in zip(members, [learner.parameters for learner in learners], strict=True):
        assert member.sync is not None
        if member.sync._held is not None:  # the simulator's peers have merged at its end
            member.sync._take_up(member.sync._held)
        mine = torch.empty_like(local)
        member.parameters.read(mine)
        torch.testing.assert_close(mine, local, rtol=0.0, atol=2e-6)
        torch.testing.assert_close(member.sync.memory.anchor, anchor, rtol=0.0, atol=2e-6)
