"""Gossip rounds of real peers in memory: the simulator's arithmetic, groups that mix, members that do not come."""

from __future__ import annotations

import time

import pytest
import torch

from peer.outer.recipe.plan import RunPlan
from peer.outer.topology.topologies import Links
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.world.scenario import PeerProfile
from tests.sim.tiny import ADAMW
from tests.sim.tiny_task import TinyTask
from tests.swarm.gossiping import NOLOCO, NOMINAL, everybody_rounds, gossip, plain_groups, scatter, spread

SIZES = (168, 72, 176)  # as the simulator cuts the tiny task into three
STREAMED = {"name": "strided", "period": 6, "num_fragments": 3}
FEEDBACK = {"name": "error-feedback", "decay": 0.9, "gain": 0.8}
RECIPES = {
    "noloco": (4, NOLOCO),
    "one of five alone": (5, NOLOCO),
    "a triple": (5, {"name": "noloco", "topology": {"name": "pairs", "odd": "triple"}}),
    "8 bits": (4, {"name": "noloco", "compressor": "int8"}),
    "2 bits with feedback": (4, {"name": "noloco", "compressor": "int2", "feedback": FEEDBACK}),
    "noloco in groups": (6, {"name": "noloco", "topology": {"name": "groups", "size": 3}}),
    "diloco in groups": (6, {"name": "diloco", "outer_momentum": 0.5, "topology": {"name": "groups", "size": 3}}),
    "parameters in pairs": (4, {"name": "fedavg", "payload": "parameters", "topology": "pairs"}),
    "parameters of neighbours": (5, {"name": "a2cid2", "merge": {"name": "mix", "alpha": 0.0}}),
    "a2cid2": (6, {"name": "a2cid2"}),
    "a2cid2 in 8 bits": (6, {"name": "a2cid2", "compressor": "int8"}),
    "a2cid2 with a mask": (6, {"name": "a2cid2", "compressor": "random0.3+fp32", "exchange": "gather"}),
    "a2cid2 on a torus": (9, {"name": "a2cid2", "topology": {"graph": "torus"}}),
    "saps": (5, {"name": "saps", "compressor": "random0.1+fp32", "topology": {"refresh": 4}}),
    "sparta": (4, {"name": "sparta", "compressor": "random0.1+fp32"}),
    "parameters in groups": (9, plain_groups(3)),
    "parameters in 8 bits": (6, {**plain_groups(3), "compressor": "int8"}),
    "the median of groups": (9, {**plain_groups(3), "aggregator": "median"}),
    "noloco in fragments": (4, {"name": "noloco", "schedule": STREAMED}),
    "fragments of 2 bits with feedback": (
        4, {"name": "noloco", "compressor": "int2", "feedback": FEEDBACK, "schedule": STREAMED}
    ),
    "parameters in fragments": (9, {**plain_groups(3), "schedule": STREAMED}),
    "fragments with a mask": (
        4, {"name": "sparta", "compressor": "random0.3+fp32", "topology": {"size": 2}, "schedule": STREAMED}
    ),
    "gated groups": (9, {**plain_groups(3), "aggregator": "gated"}),
}


class Simulated:
    """The simulator's replicas, which the test moves as it moves the peers'."""

    def __init__(self, peers, recipe):
        count = len(peers)
        setup = SimulationSetup(
            recipe=recipe, inner=ADAMW, profiles=(PeerProfile(),) * count, tokens=1, seed=peers[0].manifest.seed
        )
        simulation = Simulation(setup, TinyTask())
        self.sync, self.replicas = simulation.sync, simulation.replicas
        self.sync.nominal_tokens = NOMINAL
        for peer, replica in zip(peers, self.replicas, strict=True):
            replica.learner.parameters.copy_(peer.local)
            if replica.learner.estimate is not None:
                replica.learner.estimate.copy_(peer.local)
            if replica.learner.outer.anchor.numel():
                replica.learner.outer.anchor.copy_(peer.local)

    def round(self, fragment, number, groups, tokens):
        for group in groups:
            members = [self.replicas[index] for index in group]
            for replica in members:
                replica.unsent_tokens[fragment] = tokens[replica.index]
            sent = [self.sync.contribute(replica, fragment, number, 1.0, overlapped=False) for replica in members]
            outcome = self.sync.commit(members, sent, fragment, number, 1.0)
            for replica, contribution in zip(members, sent, strict=True):
                self.sync.merge(replica, outcome, contribution, fragment)


class Lines:
    """What peers measure: the later two peers are at the end of slow lines."""

    def __init__(self, monkeypatch):
        self.slow = set()
        monkeypatch.setattr("peer.swarm.gossip.line_meter.bytes_s_to", self.bytes_s)

    async def bytes_s(self, node, peer_id):
        return 2.0**13 if {node.peer_id, peer_id} & self.slow else 2.0**20

    async def measure(self, peers):
        self.slow = {peer.peer_id for peer in peers[-2:]}
        for peer in peers:
            for other in peers:
                if other is not peer:
                    await peer.rounds._meter.measure(other.peer_id)
        count = len(peers)
        fast = [place < count - 2 for place in range(count)]
        pair = tuple(tuple(2.0**20 if one and other else 2.0**13 for other in fast) for one in fast)
        return Links(up=(2.0**20,) * count, down=(2.0**20,) * count, pair=pair)


@pytest.fixture
def lines(monkeypatch):
    return Lines(monkeypatch)


@pytest.mark.parametrize("name", RECIPES)
async def test_the_rounds_of_peers_are_those_of_the_simulator_bit_for_bit(network, tmp_path, lines, name):
    count, recipe = RECIPES[name]
    task = TinyTask()
    numel = task.layout.numel
    elements = 1 << 19 if "gated" in name else 256  # norms need the vector whole
    sizes = SIZES if "fragments" in name else ()
    peers = await gossip(network, tmp_path, recipe, count, numel=numel, elements=elements, sizes=sizes)
    built = RunPlan.of(peers[0].manifest).recipe
    simulated = Simulated(peers, built)
    links = await lines.measure(peers) if name == "saps" else None
    numbers = [peer.number for peer in peers] if links is None else range(count)
    tokens, places = [100 + 10 * index for index in range(count)], {p.peer_id: i for i, p in enumerate(peers)}
    mixed = set[str]()
    for number in range(1, 8 if sizes else 5):
        turn = built.turns(number - 1)
        noise = torch.Generator().manual_seed(number)
        for peer, replica in zip(peers, simulated.replicas, strict=True):
            step = 0.1 * torch.randn(numel, generator=noise)
            peer.local += step
            replica.learner.parameters.add_(step)
            if replica.learner.estimate is not None:
                replica.learner.estimate += step
        records = await everybody_rounds(peers, tokens)
        groups = {tuple(places[peer_id] for peer_id in record.members) for record in records}
        drawn = built.topology.groups(turn.rounds + 1, numbers, peers[0].manifest.seed, links)
        assert {tuple(numbers[at] for at in group) for group in groups} == set(drawn)
        simulated.round(turn.fragment, turn.rounds + 1, groups, tokens)
        for peer, replica, record in zip(peers, simulated.replicas, records, strict=True):
            assert (record.status, record.round, record.reason) == ("committed", number, None)
            assert record.drawn == record.members
            if replica.learner.estimate is None:
                assert torch.equal(peer.local, replica.learner.parameters)
            else:  # of the second iterate a peer keeps how far it is ahead
                second = peer.state.anchor + peer.state.buffers[0]
                torch.testing.assert_close(peer.local, replica.learner.parameters, rtol=0.0, atol=1e-6)
                torch.testing.assert_close(second, replica.learner.estimate, rtol=0.0, atol=1e-6)
                assert torch.equal(peer.local, peer.state.anchor)
                assert peer.peer_id not in mixed or float(peer.state.buffers[0].norm()) > 0.01
                mixed |= {peer.peer_id} if len(record.members) > 1 else set()  # the draw may leave it alone for rounds
                continue
            assert record.state_digest == peer.state.digest()
            for buffer, theirs in zip(peer.state.buffers, replica.learner.outer.buffers, strict=True):
                assert torch.equal(buffer, theirs)


async def test_a_peer_that_skips_rounds_makes_the_next_of_the_fragment_that_it_has_trained_for(network, tmp_path):
    peers = await gossip(network, tmp_path, {**NOLOCO, "schedule": STREAMED}, 3, numel=416, sizes=SIZES)
    late, *others = peers
    late.alive = False
    for _ in range(5):
        await everybody_rounds(others)
    late.alive = True
    fragment, before = late.state.part, late.state.anchor.clone()
    late.local[fragment.start : fragment.stop] += 1.0
    record = await late.round()
    assert (record.status, record.round) == ("committed", 7)  # 1 and 4 are over
    changed = (late.state.anchor != before).nonzero().flatten()
    assert (int(changed.min()), int(changed.max())) == (fragment.start, fragment.stop - 1)


@pytest.mark.parametrize(("count", "size", "rounds"), [(9, 3, 2), (16, 4, 2), (8, 2, 3)])
async def test_on_a_full_grid_all_hold_the_mean_of_all_after_a_round_for_each_axis(
    network, tmp_path, count, size, rounds
):
    peers = await gossip(network, tmp_path, plain_groups(size), count)
    scatter(peers)
    mean = torch.stack([peer.local.double() for peer in peers]).mean(0).float()
    for number in range(1, rounds + 1):
        records = await everybody_rounds(peers)
        assert [len(record.members) for record in records] == [size] * count
        assert (spread(peers) < 1e-5) == (number == rounds)
    for peer in peers:
        torch.testing.assert_close(peer.local, mean, rtol=0.0, atol=1e-6)


async def test_pairs_come_closer_round_by_round(network, tmp_path):
    peers = await gossip(network, tmp_path, NOLOCO, 4)
    scatter(peers)
    before = spread(peers)
    for _ in range(40):
        await everybody_rounds(peers)
    assert spread(peers) < 0.05 * before


async def test_a_member_that_is_gone_costs_its_pair_that_round_and_nothing_else(network, tmp_path):
    """It cannot be dialled: its partner, whom it was drawn for, makes the round alone at once; the others, in pairs."""
    peers = await gossip(network, tmp_path, NOLOCO, 4, straggler_wait_s=60.0)
    scatter(peers)
    await everybody_rounds(peers)
    gone = peers[0]
    network.cut(gone.peer_id)  # its record is still there
    scatter(peers, seed=1)
    before = {peer.peer_id: peer.state.anchor.clone() for peer in peers}
    records = await everybody_rounds(peers[1:])
    lone = [record for record in records if gone.peer_id in record.drawn]
    assert len(lone) == 1
    assert len(lone[0].members) == 1
    assert lone[0].culprit == gone.peer_id
    assert "cannot be reached" in lone[0].reason
    assert sorted(len(record.members) for record in records) == [1, 2, 2]
    assert all(not torch.equal(peer.state.anchor, before[peer.peer_id]) for peer in peers[1:])


async def test_a_member_that_does_not_come_is_waited_for_no_longer_than_the_bound(network, tmp_path):
    peers = await gossip(network, tmp_path, NOLOCO, 2, straggler_wait_s=0.5)
    peers[0].rounds.patience_s = 0.5
    began = time.monotonic()
    record = await peers[0].round()
    assert time.monotonic() - began >= 0.5
    assert record.members == (peers[0].peer_id,)
    assert record.reason.startswith(f"{peers[1].peer_id} did not come within ")
    assert peers[1].wanted >= 1  # it was asked for what it had
    late = await peers[1].round()  # for the round that the other has made: the next is the one that others make
    assert (late.round, len(late.members)) == (2, 1)
    assert peers[0].records[-1].round == 1


async def test_a_group_goes_on_without_whom_nobody_can_reach(network, tmp_path):
    peers = await gossip(network, tmp_path, plain_groups(4), 4, straggler_wait_s=60.0)
    scatter(peers)
    rest = peers[1:]
    mean = torch.stack([peer.local for peer in rest]).mean(0)
    network.cut(peers[0].peer_id)
    for record in await everybody_rounds(rest):
        assert record.members == tuple(peer.peer_id for peer in rest)
        assert set(record.drawn) == {peer.peer_id for peer in peers}
        assert peers[0].peer_id in record.reason
    for peer in rest:
        torch.testing.assert_close(peer.local, mean, rtol=0.0, atol=1e-6)


async def test_members_that_see_other_peers_make_the_round_alone_and_meet_again(network, tmp_path):
    peers = await gossip(network, tmp_path, plain_groups(3), 3, straggler_wait_s=60.0)
    scatter(peers)
    peers[0].directory.hidden.add(peers[2].peer_id)
    first = await everybody_rounds(peers)
    assert [len(record.members) for record in first] == [1, 2, 2]
    assert [record.culprit for record in first[1:]] == [peers[0].peer_id] * 2
    assert "sees another group" in first[0].reason
    peers[0].directory.hidden.clear()
    assert [len(record.members) for record in await everybody_rounds(peers)] == [3, 3, 3]


async def test_who_claims_a_round_that_no_run_has_is_not_followed(network, tmp_path, monkeypatch):
    byzantine, victim = await gossip(network, tmp_path, NOLOCO, 2)
    honest = byzantine.record()
    monkeypatch.setattr(byzantine, "record", lambda: honest.model_copy(update={"round": 2**53 - 1}))
    monkeypatch.setattr(victim.rounds, "patience_s", 0.1)
    assert (await victim.round()).round == 1


async def test_who_fell_behind_makes_the_round_that_the_others_make(network, tmp_path):
    peers = await gossip(network, tmp_path, NOLOCO, 4)
    behind, ahead = peers[0], peers[1:]
    for peer in ahead:
        peer.directory.hidden.add(behind.peer_id)
    for _ in range(3):
        await everybody_rounds(ahead)
    for peer in ahead:
        peer.directory.hidden.clear()
    records = await everybody_rounds(peers)
    assert [record.round for record in records] == [4] * 4
    assert [len(record.members) for record in records] == [2] * 4


@pytest.mark.usefixtures("small_chunks")
async def test_a_newcomer_takes_a_live_peers_signed_state_and_is_told_whose_word_that_is(network, tmp_path):
    peers = await gossip(network, tmp_path, NOLOCO, 3, numel=3000, elements=512)
    newcomer = peers.pop()
    for peer in peers:
        peer.directory.hidden.add(newcomer.peer_id)
    scatter(peers)
    for _ in range(2):
        await everybody_rounds(peers)
    await newcomer.rounds._initial_state.start(False)
    record = newcomer.records[-1]
    donor = next(peer for peer in peers if peer.peer_id == record.donor)
    assert (record.status, record.round, record.snapshot_round) == ("caught_up", 2, 2)
    assert "rests on its signer's word alone" in record.reason
    assert newcomer.state.digest() == donor.state.digest() == record.lineage_id
    assert newcomer.rounds.position().round == 2
