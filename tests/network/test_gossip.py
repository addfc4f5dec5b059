"""Gossip rounds with real processes: pairs that come closer, a killed partner, a newcomer, groups on a grid."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import pytest
import torch

from peer.link.messages import LivePeers, Message, RoundEnded
from peer.outer.record import RoundRecord
from peer.outer.topology.topologies import Neighbours
from peer.protocol.manifest import parse_manifest
from peer.swarm.gossip.group_draw import number_of
from peer.swarm.gossip.line_meter import spoken
from tests.network.harness import TestSwarm
from tests.network.members import Member
from tests.network.trained import INNER, TrainedMember, all_seen, orders_of, simulated, task_of

pytestmark = pytest.mark.timeout(200)
MakeSwarm = Callable[..., TestSwarm]
NOLOCO = "name: noloco, aggregator: mean"
GROUPS = "name: fedavg, payload: parameters, topology: {name: groups, size: 2}, aggregator: mean"


@dataclass
class Onlooker(Member):
    """Notes the rounds that it drew while its directory showed exactly the peers `swarm_ids` as training.

    A peer draws from the records that it sees, and these expire: on a machine that is slow for seconds a draw may lack
    a peer, and others be neighbours then.
    """

    swarm_ids: frozenset[str] = frozenset()
    drawn_from_all: list[RoundRecord] = field(default_factory=list)
    _sees_all_until: float = 0.0  # unix seconds; without a gap
    _saw_all_at_draw: bool = False

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if isinstance(message, LivePeers):
            training = {peer_id: record for peer_id, record in message.peers.items() if record.state == "training"}
            sees_all = training.keys() == self.swarm_ids
            self._saw_all_at_draw &= sees_all and time.time() < self._sees_all_until
            self._sees_all_until = min(record.expires_at for record in training.values()) if sees_all else 0.0
        elif isinstance(message, RoundEnded):
            sees_all = (message.record.ended_at or 0.0) < self._sees_all_until
            if sees_all and self._saw_all_at_draw:
                self.drawn_from_all.append(message.record)
            self._saw_all_at_draw = sees_all  # the next round is drawn after this


def spread(members: list[Member]) -> float:
    """The largest distance of a trainer's parameters from the mean of all."""
    flat = torch.stack([member.replica.flat for member in members if member.replica is not None])
    return float((flat - flat.mean(0)).norm(dim=1).max())


def pairs_since(members: list[Member], counts: dict[str, int]) -> bool:
    """Whether everybody has averaged with another one three times since."""
    return all(sum(len(r.members) == 2 for r in m.committed[counts[m.name] :]) >= 3 for m in members)


def apart_then_close(swarm: TestSwarm, members: list[Member], timeout_s: float = 60.0) -> float:
    """Let members that train apart stop and come together; -> how far apart they were."""
    began = counted(members)
    swarm.drive(lambda: pairs_since(members, began))
    apart = spread(members)
    for member in members:
        member.push.zero_()
    swarm.drive(lambda: spread(members) < 0.1 * apart, timeout_s)
    return apart


def counted(members: list[Member]) -> dict[str, int]:
    return {member.name: len(member.committed) for member in members}


def test_pairs_come_closer_survive_a_kill_and_take_in_a_newcomer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=4, wait=1.0, recipe=NOLOCO)
    swarm.bootstrap()
    members = swarm.add("a", "b", "c", "d")
    apart = apart_then_close(swarm, members)
    assert not any(r.status != "committed" and not r.alone for member in members for r in member.records)

    gone, rest = members[3], members[:3]
    gone.kill()
    swarm.drive(lambda: any(r.culprit == gone.peer_id for member in rest for r in member.committed))
    began = counted(rest)
    swarm.drive(lambda: pairs_since(rest, began), 90.0)
    assert spread(rest) < apart

    (late,) = swarm.add("late")
    assert late.round >= min(began.values())
    assert "rests on its signer's word alone" in late.log_text()
    swarm.drive(lambda: pairs_since([late], {"late": 0}), 90.0)


OVERLAPPED = "schedule: {name: every, steps: 4, overlap_steps: 2}, topology: {name: groups, size: 4}, aggregator: mean"


@pytest.mark.long
@pytest.mark.parametrize("recipe", [
    "name: fedavg, payload: parameters", "name: sparta, compressor: random0.3+fp32",
    "name: diloco, outer_momentum: 0.5, merge: carry",
])  # fmt: skip
def test_peers_take_up_a_mean_as_late_as_the_simulators(make_swarm: MakeSwarm, recipe: str) -> None:
    swarm = make_swarm(steps=4, wait=20.0, recipe=f"{recipe}, {OVERLAPPED}")
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    task = task_of(manifest)
    swarm.kind, swarm.shapes = partial(TrainedMember, manifest=manifest), task.layout.shapes
    swarm.bootstrap()
    members = cast("list[TrainedMember]", swarm.add("a", "b", "c"))
    members.sort(key=lambda member: number_of(member.run_id, member.peer_id))
    for index, member in enumerate(members):
        member.batches, member.waits, member.last_step = task.batches(index), True, 1
    swarm.drive(lambda: all_seen(members))
    for member in members:
        member.last_step = 12
    swarm.drive(lambda: all(len(member.committed) >= 3 and not member.in_round for member in members))
    assert {len(record.members) for member in members for record in member.committed} == {3}, swarm.explain()
    learners = simulated(manifest, task, INNER, 12, orders_of(members))
    for member, learner in zip(members, learners, strict=True):
        assert member.sync is not None
        assert member.sync._held is not None  # the simulator's peers have merged at its end
        member.sync._take_up(member.sync._held)
        mine = torch.empty_like(learner.parameters)
        member.parameters.read(mine)
        torch.testing.assert_close(mine, learner.parameters, rtol=0.0, atol=2e-6)


@pytest.mark.long
def test_a_few_parameters_of_all_bring_peers_together_through_a_kill_and_with_a_newcomer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=1, wait=1.0, recipe="name: sparta, aggregator: mean, compressor: random0.3+fp32")
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    swarm.drive(lambda: all(sum(len(r.members) == 3 for r in member.committed) >= 3 for member in members))
    apart = spread(members)
    for member in members:
        member.push.zero_()
    swarm.drive(lambda: 0.0 < spread(members) < 0.1 * apart)
    members.pop().kill()
    began = counted(members)
    swarm.drive(lambda: pairs_since(members, began), 90.0)
    (late,) = swarm.add("late")
    swarm.drive(lambda: sum(len(r.members) == 3 for r in late.committed) >= 3, 90.0)


@pytest.mark.long
def test_peers_that_share_a_few_parameters_go_the_simulators_way_through_a_kill_and_with_a_newcomer(
    make_swarm: MakeSwarm,
) -> None:
    steps, rounds = 3, 6
    swarm = make_swarm(steps=steps, recipe="name: sparta, aggregator: mean, compressor: random0.3+fp32", wait=20.0)
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    task = task_of(manifest)
    swarm.kind, swarm.shapes = partial(TrainedMember, manifest=manifest), task.layout.shapes
    swarm.bootstrap()
    members = cast("list[TrainedMember]", swarm.add("a", "b", "c"))
    for index, member in enumerate(members):
        member.batches, member.waits, member.last_step = task.batches(index), True, 1
    swarm.drive(lambda: all_seen(members))
    for member in members:
        member.last_step = steps * rounds
    swarm.drive(lambda: all(member.round == member.recorded == rounds and not member.in_round for member in members))
    assert {len(record.members) for member in members for record in member.committed} == {3}, swarm.explain()
    simulators = [one.parameters for one in simulated(manifest, task, INNER, steps * rounds, orders_of(members))]
    for member, theirs in zip(members, simulators, strict=True):
        member.parameters.read(mine := torch.empty_like(theirs))
        assert torch.equal(mine, theirs)
    assert all(float((simulators[0] - other).abs().max()) > 1e-3 for other in simulators[1:])  # each its own

    for member in members:
        member.waits, member.last_step = False, 10**9
    members.pop().kill()
    began = counted(members)
    swarm.drive(lambda: pairs_since(members, began), 90.0)
    (late,) = cast("list[TrainedMember]", swarm.add("late"))
    late.batches = task.batches(3)
    swarm.drive(lambda: sum(len(r.members) == 3 for r in late.committed) >= 3, 90.0)


@pytest.mark.long
def test_peers_come_closer_fragment_by_fragment_through_a_kill_and_with_a_newcomer(make_swarm: MakeSwarm) -> None:
    schedule = "schedule: {name: strided, period: 6, num_fragments: 3, overlap_steps: 1}"
    swarm = make_swarm(steps=6, layers=3, wait=1.0, recipe=f"{NOLOCO}, {schedule}")
    swarm.bootstrap()
    members = swarm.add("a", "b", "c", "d")
    apart_then_close(swarm, members, 120.0)
    members.pop().kill()
    (late,) = swarm.add("late")
    began = counted([*members, late])
    swarm.drive(lambda: pairs_since([*members, late], began), 120.0)


@pytest.mark.long
@pytest.mark.parametrize(("graph", "names", "rate"), [
    ("ring", "abcd", 1.0), ("ring", "abcd", 0.5), ("ring", "abcd", 2.0), ("torus", "abcdef", 1.0),
])  # fmt: skip
def test_neighbours_come_closer_with_a_second_iterate_through_a_kill_and_with_a_newcomer(
    make_swarm: MakeSwarm, graph: Literal["ring", "torus"], names: str, rate: float
) -> None:
    topology, timer = f"topology: {{graph: {graph}}}", f"schedule: {{name: timer, rate: {rate}}}"
    swarm = make_swarm(wait=1.0, recipe=f"name: a2cid2, aggregator: mean, {topology}, {timer}")
    swarm.manifest_text = swarm.manifest_text.replace(", steps_per_round: 5", "")
    swarm.bootstrap()
    swarm.kind = Onlooker
    members = cast("list[Onlooker]", swarm.add(*names))  # on a ring of three nothing is accelerated
    numbers = {member.peer_id: number_of(member.run_id, member.peer_id) for member in members}
    edges = Neighbours(graph=graph).edges(list(numbers.values()))
    for member in members:
        member.swarm_ids = frozenset(numbers)

    def pairs_of(member: Onlooker) -> list[tuple[int, ...]]:
        rosters = [record.members for record in member.drawn_from_all if len(record.members) == 2]
        return [tuple(sorted(numbers[one] for one in roster)) for roster in rosters]

    def met() -> set[tuple[int, ...]]:
        return {pair for member in members for pair in pairs_of(member)}

    # the draw may repeat a pair
    swarm.drive(lambda: len(met()) >= 3 and all(len(pairs_of(member)) >= 3 for member in members), 90.0)
    assert met() <= set(edges)
    assert all(member.sync.step >= (len(member.committed) - 1) / rate for member in members)
    assert len(edges) == (4 if graph == "ring" else 9)
    apart = spread(members)
    ahead = [member.sync.memory.buffers[0] for member in members if member.sync is not None]
    assert all(float(buffer.norm()) > 0.0 for buffer in ahead)
    for member in members:
        member.push.zero_()
    swarm.drive(lambda: spread(members) < 0.1 * apart and max(float(buffer.abs().max()) for buffer in ahead) < apart)

    members.pop().kill()
    began = counted(members)
    swarm.drive(lambda: pairs_since(members, began), 90.0)
    (late,) = swarm.add("late")
    swarm.drive(lambda: pairs_since([late], {"late": 0}), 90.0)
    late.push.zero_()
    swarm.drive(lambda: spread([*members, late]) < 0.1 * apart)


@pytest.mark.long
def test_pairs_of_measured_lines_average_masked_coordinates_through_a_kill_and_with_a_newcomer(
    make_swarm: MakeSwarm,
) -> None:
    swarm = make_swarm(steps=1, wait=1.0, recipe="name: saps, aggregator: mean, compressor: random0.5+fp32")
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    swarm.drive(lambda: all(len(measured(member)) == 2 for member in members))
    assert all(rate > 1e5 for member in members for rate in measured(member).values())  # they are on one machine
    began = counted(members)
    swarm.drive(lambda: pairs_since(members, began) and all(len(member.committed) >= 5 for member in members))
    apart = spread(members)
    for member in members:
        member.push.zero_()
    swarm.drive(lambda: spread(members) < 0.5 * apart)
    sizes = {record.bytes_sent for member in members for record in member.committed if len(record.members) == 2}
    assert min(sizes) < 0.7 * 4 * members[0].replica.flat.numel()  # half of the coordinates, and no positions

    members.pop().kill()
    began = counted(members)
    swarm.drive(lambda: pairs_since(members, began), 90.0)
    (late,) = swarm.add("late")
    members.append(late)
    late.push.zero_()
    swarm.drive(lambda: pairs_since([late], {"late": 0}) and len(measured(late)) >= 2, 90.0)
    swarm.drive(lambda: spread(members) < 0.5 * apart)


def measured(member: Member) -> dict[str, float]:
    """Bytes/s of the lines that this peer has measured, as the others read it in its record."""
    return spoken(member.swarm.peers[member.peer_id].lines) if member.swarm is not None else {}


def test_groups_of_two_bring_four_trainers_to_one_point(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=4, wait=2.0, recipe=GROUPS)
    swarm.bootstrap()
    members = swarm.add("a", "b", "c", "d")
    swarm.drive(lambda: all(any(len(r.members) == 2 for r in member.committed) for member in members))
    assert spread(members) > 1e-4
    for member in members:
        member.push.zero_()
    swarm.drive(lambda: spread(members) < 1e-6)
