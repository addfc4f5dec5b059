"""Gossip rounds beside members that break the protocol or stop half-way; what a restart or a Byzantine peer leaves."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest
import torch

from peer.errors import ProtocolError
from peer.link.memory import Head
from peer.protocol.records import dump_json, parse_json, seal
from peer.protocol.wire import GossipJoin, GossipRoster, GossipState, Kind, roster_digest
from peer.swarm.agent.outer_checkpoint import save_outer_state
from peer.swarm.gossip.inbox import round_name
from peer.swarm.gossip.initial_state import STATE_DOMAIN
from peer.swarm.gossip.store import LocalStateStore
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.round.deadline import DeadlineEstimator
from peer.swarm.state.chain import ChainStore
from tests.swarm.gossiping import NOLOCO, everybody_rounds, gossip, plain_groups, scatter

NAN = struct.pack("<f", float("nan"))


class Puppet:
    """A member of a pair that sends what the test says, and takes whatever comes."""

    def __init__(self, peer, victim):
        self.peer, self.victim = peer, victim
        self.ends = 0

    async def start(self):
        async def absorb(stream):
            limits = dict.fromkeys(Kind, 1 << 24)
            while True:
                kind, _ = await stream.receive(limits)
                self.ends += kind is Kind.END

        await self.peer.node.serve(round_name(self.peer.manifest.run_id), "round", absorb)
        return self

    def join(self, round, **changes):
        run_id = self.peer.manifest.run_id
        roster = tuple(p.peer_id for p in sorted((self.peer, self.victim), key=lambda p: p.number))
        values = {"run_id": run_id, "round": round, "roster": roster, "tokens": 100, **changes}
        return GossipJoin(**{"digest": roster_digest(run_id, values["round"], values["roster"]), **values})

    async def speak(self, round, *frames):
        stream = await self.peer.node.open(self.victim.peer_id, round_name(self.peer.manifest.run_id), "round")
        join = self.join(round)
        await stream.send_message(Kind.JOIN, join)
        await stream.send_message(Kind.ROSTER, GossipRoster(members=join.roster))
        for kind, body in frames:
            await stream.send(kind, body)
        return stream

    def honest(self):
        """Frames as an honest member would send them."""
        mixing = self.peer.rounds._mixing
        return [(Kind.CONTRIBUTION, mixing.encode(index, self.peer.local, 1)) for index in range(len(mixing.slices))]


async def pair(network, folder, **rounds):
    byzantine, victim = await gossip(network, folder, NOLOCO, 2, **{"straggler_wait_s": 60.0, **rounds})
    scatter([byzantine, victim])
    return await Puppet(byzantine, victim).start(), victim


def spoiled(frames, index, at, value):
    kind, body = frames[index]
    return [*frames[:index], (kind, body[:at] + value + body[at + 4 :]), *frames[index + 1 :]]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda honest: spoiled(honest, 1, 0, NAN), "malformed contribution"),
        (lambda honest: spoiled(honest, 1, 4 * 128, NAN), "malformed contribution"),  # in its anchor
        (lambda honest: [(Kind.CONTRIBUTION, honest[0][1] + b"more")], "announces"),
        (lambda honest: [(Kind.REDUCED, honest[0][1])], "sent REDUCED; expected CONTRIBUTION"),
        (lambda honest: [*honest, (Kind.CONTRIBUTION, b"again")], "sent CONTRIBUTION; expected END"),
    ],
)
async def test_who_sends_nonsense_is_named_and_the_round_made_alone(network, tmp_path, lie, reason):
    puppet, victim = await pair(network, tmp_path)
    round = asyncio.ensure_future(victim.round())
    frames = lie(puppet.honest())
    with contextlib.suppress(StreamClosedError):  # the victim had enough
        await puppet.speak(1, *frames)
    record = await round
    assert (record.status, record.members, record.phase) == ("committed", (victim.peer_id,), "exchange")
    assert reason in record.reason
    assert record.culprit == puppet.peer.peer_id
    assert bool(torch.isfinite(victim.state.anchor).all())
    assert puppet.ends == 0 or "expected END" in reason  # only then it had all that it needed


@pytest.mark.parametrize("frames", [0, 1, 3])
async def test_who_stops_half_way_is_waited_for_no_longer_than_the_round_may_take(network, tmp_path, frames):
    """Three frames are all there are: then it only never says that it holds everything."""
    puppet, victim = await pair(network, tmp_path)
    victim.rounds._budget = DeadlineEstimator(0.5, 10.0)
    round = asyncio.ensure_future(victim.round())
    await puppet.speak(1, *puppet.honest()[:frames])
    record = await round
    assert record.members == (victim.peer_id,)
    assert record.reason == f"{puppet.peer.peer_id} was not done within 0 s"
    assert record.culprit == puppet.peer.peer_id


async def test_who_leaves_in_the_middle_is_missed_at_once(network, tmp_path):
    puppet, victim = await pair(network, tmp_path)
    round = asyncio.ensure_future(victim.round())
    (await puppet.speak(1, *puppet.honest()[:2])).close()
    record = await round
    assert record.members == (victim.peer_id,)
    assert "stream ended" in record.reason


async def test_a_group_goes_on_without_a_member_that_came_and_left_before_it_formed(network, tmp_path):
    peers = await gossip(network, tmp_path, plain_groups(3), 3, straggler_wait_s=60.0)
    scatter(peers)
    gone, *rest = peers
    mean = torch.stack([peer.local for peer in rest]).mean(0)
    name, roster = round_name(gone.manifest.run_id), tuple(peer.peer_id for peer in peers)

    async def hang_up(stream):
        await stream.receive({Kind.JOIN: 4096})

    await gone.node.serve(name, "round", hang_up)
    join = Puppet(gone, rest[0]).join(1, roster=roster)
    for peer in rest:
        stream = await gone.node.open(peer.peer_id, name, "round")
        await stream.send_message(Kind.JOIN, join)
        stream.close()
    for record in await everybody_rounds(rest):
        assert record.members == tuple(peer.peer_id for peer in rest)
        assert record.culprit == gone.peer_id
    for peer in rest:
        torch.testing.assert_close(peer.local, mean, rtol=0.0, atol=1e-6)


async def test_a_join_that_names_others_or_lies_about_its_roster_is_not_one(network, tmp_path):
    puppet, victim = await pair(network, tmp_path)
    stranger = puppet.join(1, roster=tuple(sorted((puppet.peer.peer_id, network.node().peer_id))))
    stream = await puppet.peer.node.open(victim.peer_id, round_name(puppet.peer.manifest.run_id), "round")
    await stream.send_message(Kind.JOIN, stranger)
    await stream.closed()
    assert not victim.rounds._inboxes.waiting
    forged = dump_json(puppet.join(1)).replace(puppet.join(1).digest.encode(), b"0" * 64)
    with pytest.raises(ProtocolError, match="digest is not that of its roster"):
        parse_json(GossipJoin, forged)


async def test_a_round_that_is_over_is_not_joined_again(network, tmp_path):
    peers = await gossip(network, tmp_path, NOLOCO, 2)
    await everybody_rounds(peers)
    puppet = Puppet(*peers)
    stream = await peers[0].node.open(peers[1].peer_id, round_name(peers[0].manifest.run_id), "round")
    await stream.send_message(Kind.JOIN, puppet.join(1))
    kind, _ = await stream.receive({Kind.REJECT: 1000})
    assert kind is Kind.REJECT
    assert not peers[1].rounds._inboxes.waiting


async def test_a_donor_that_serves_another_state_than_it_signs_is_left_for_the_next(network, tmp_path):
    peers = await gossip(network, tmp_path, NOLOCO, 3)
    newcomer = peers.pop()
    for peer in peers:
        peer.directory.hidden.add(newcomer.peer_id)
    scatter(peers)
    await everybody_rounds(peers)
    byzantine, honest = peers

    async def sign(stream):
        signed = GossipState(run_id=byzantine.manifest.run_id, round=1, state_digest="a" * 64)
        await stream.send(Kind.META, seal(byzantine.node.identity, STATE_DOMAIN, dump_json(signed)))

    await byzantine.node.serve(byzantine.rounds._initial_state._name, "history", sign)
    newcomer.rounds._initial_state._rng.shuffle = lambda donors: donors.sort(key=lambda p: p != byzantine.peer_id)
    await newcomer.rounds._initial_state.start(False)
    assert newcomer.records[-1].donor == honest.peer_id
    assert newcomer.state.digest() == honest.state.digest()


async def test_a_state_outlives_its_agent_and_is_saved_whole(network, tmp_path):
    peers = await gossip(network, tmp_path, plain_groups(2), 2)
    scatter(peers)
    await everybody_rounds(peers)
    peer = peers[0]
    saved = await save_outer_state(peer.rounds, tmp_path)
    assert (saved.round, saved.lineage_id, saved.problem) == (1, peer.state.digest(), None)
    again = LocalStateStore(peer.memory, peer.state, ChainStore(tmp_path / "again", peer.manifest.genesis))
    head = again.restore()
    assert isinstance(head, Head)
    assert (head.round, head.contributed, again.valid) == (1, 1, True)
    peer.memory.anchor[0] += 1.0  # it died while it wrote
    torn = LocalStateStore(peer.memory, peer.state, ChainStore(tmp_path / "torn", peer.manifest.genesis))
    assert torn.restore() is None
    assert not torn.valid


@pytest.mark.parametrize("aggregator", ["gated", "median"])
async def test_a_group_of_four_tolerates_a_byzantine_member_if_its_aggregator_can_judge(network, tmp_path, aggregator):
    recipe = {**plain_groups(4), "aggregator": aggregator}
    peers = await gossip(network, tmp_path, recipe, 4, elements=1 << 19)
    byzantine, honest = peers[1], [peers[0], *peers[2:]]
    scatter(peers)
    mean = torch.stack([peer.local for peer in honest]).mean(0)
    away = max(float((peer.local - mean).norm()) for peer in honest)
    byzantine.local *= -1000.0
    records = await everybody_rounds(peers)
    assert all(len(record.members) == 4 for record in records)
    for peer in honest:
        assert float((peer.local - mean).norm()) < away
        assert torch.equal(peer.local, honest[0].local)
    if aggregator == "gated":
        assert [drop.peer_id for drop in records[0].dropped] == [byzantine.peer_id]
