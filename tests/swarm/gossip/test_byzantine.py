"""What a member, a donor or a stranger can say in gossip rounds to bend them, and what becomes of it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from peer.link.messages import Progress
from peer.protocol.identity import Identity
from peer.protocol.wire import GossipRoster, Kind
from peer.swarm.gossip.inbox import MAX_STRANGERS, round_name
from tests.swarm import gossiping
from tests.swarm.gathering import until
from tests.swarm.gossip.test_faults import Puppet
from tests.swarm.gossiping import GossipPeer, everybody_rounds, gossip, plain_groups, scatter

LIMITS = dict.fromkeys(Kind, 1 << 24)


async def absorb(stream):
    while True:
        await stream.receive(LIMITS)


async def test_no_member_has_another_to_itself_by_saying_that_the_others_did_not_come(network, tmp_path):
    recipe = {**plain_groups(4), "aggregator": "gated"}
    peers = await gossip(network, tmp_path, recipe, 4, straggler_wait_s=20.0)
    scatter(peers)
    byzantine, *honest = peers
    roster, name = tuple(peer.peer_id for peer in peers), round_name(byzantine.manifest.run_id)
    before, mixing = [peer.local.norm() for peer in honest], byzantine.rounds._mixing

    async def take_aside(victim):
        stream = await byzantine.node.open(victim.peer_id, name, "round")
        await stream.send_message(Kind.JOIN, Puppet(byzantine, victim).join(1, roster=roster))
        two = tuple(peer_id for peer_id in roster if peer_id in (byzantine.peer_id, victim.peer_id))
        await stream.send_message(Kind.ROSTER, GossipRoster(members=two))
        for index in range(len(mixing.slices)):
            await stream.send(Kind.CONTRIBUTION, mixing.encode(index, byzantine.local * -500, 1))
        await stream.send(Kind.END)

    async def answer(stream):
        await stream.receive(LIMITS)
        network.spawn(take_aside(next(peer for peer in honest if peer.peer_id == stream.remote)))
        await absorb(stream)

    await byzantine.node.serve(name, "round", answer)
    first = asyncio.ensure_future(honest[0].round())
    await until(lambda: byzantine.peer_id in honest[0].rounds._inboxes.waiting or first.done(), 30.0)
    records = await asyncio.gather(first, *(peer.round() for peer in honest[1:]))
    for peer, record, norm in zip(honest, records, before, strict=True):
        assert record.status == "committed"
        assert byzantine.peer_id not in record.members
        assert peer.state.anchor.norm() <= 1.2 * norm


async def test_many_records_carry_nobody_to_the_end_of_the_run(network, tmp_path, monkeypatch):
    peers = await gossip(network, tmp_path, plain_groups(4), 3, total=50)
    said = peers[0].record().model_copy(update={"round": 50})
    made_up, true = {f"12D3KooW{number:040d}": said for number in range(4)}, gossiping.PlayedDirectory.peers
    monkeypatch.setattr(gossiping.PlayedDirectory, "peers", property(lambda self: {**true.fget(self), **made_up}))
    records = await everybody_rounds(peers)
    assert {record.round for record in records} == {5}
    assert not any(peer.rounds.finished for peer in peers)


@pytest.mark.parametrize("round", [1, 50])
async def test_a_newcomer_takes_no_state_that_is_not_finite_or_far_ahead(network, tmp_path, round):
    peers = await gossip(network, tmp_path, plain_groups(4), 3, total=50)
    await everybody_rounds(peers)
    donor = peers[0]
    if round == 1:
        donor.memory.anchor.fill_(float("nan"))
    digest = donor.state.digest()
    donor.state.round, donor.state.lineage_id = round, digest
    donor.store.position = type(donor.store.position)(1, digest, 1)
    donor.store.snapshot_cache.files.clear()
    anchor = torch.sin(torch.arange(300, dtype=torch.float32))
    node = network.node(Identity.generate())
    new = GossipPeer(peers, node, plain_groups(4), anchor, tmp_path / "new", 128, total=50)
    new.rounds._initial_state._rng.shuffle = lambda donors: donors.sort(key=lambda peer_id: peer_id != donor.peer_id)
    await new.start()
    assert new.rounds.position().round == 1
    assert torch.isfinite(new.state.anchor).all()


async def test_only_whom_a_peer_would_meet_sets_its_pace_and_once_a_round(network, tmp_path):
    peers = await gossip(network, tmp_path, plain_groups(4), 4, straggler_wait_s=0.2)
    byzantine, victim = peers[:2]
    victim.rounds.slot.on_progress(
        Progress(step=1, tokens=1, tokens_per_s=1.0, unsent_tokens=0, due_in_s=3600.0, loss=1.0, seconds_waiting=0.0)
    )
    puppet, name = Puppet(byzantine, victim), round_name(byzantine.manifest.run_id)

    async def come(join):
        stream = await byzantine.node.open(victim.peer_id, name, "round")
        await stream.send_message(Kind.JOIN, join)
        await until(lambda: getattr(victim.rounds._inboxes.waiting.get(byzantine.peer_id), "join", None) == join)

    await come(puppet.join(1))  # of two, where the draw is of four
    await come(puppet.join(900, roster=victim.rounds._draw.group(900, victim.rounds._live())))  # long before its time
    assert victim.rounds._called_for == 0
    before = victim.wanted
    await come(puppet.join(1, roster=victim.rounds._draw.group(1, victim.rounds._live())))
    await until(lambda: victim.wanted > before)
    assert victim.rounds._called_for == 1


async def test_strangers_take_no_more_than_their_share_of_the_places(network, tmp_path):
    peers = await gossip(network, tmp_path, plain_groups(4), 4, straggler_wait_s=20.0)
    victim, name, streams = peers[1], round_name(peers[1].manifest.run_id), []
    for _ in range(MAX_STRANGERS + 3):
        node = network.node(Identity.generate())
        roster = (node.peer_id, victim.peer_id)
        stream = await node.open(victim.peer_id, name, "round")
        await stream.send_message(Kind.JOIN, Puppet(peers[0], victim).join(1, roster=roster))
        streams.append(stream)
    for stream in streams[-3:]:
        kind, _ = await asyncio.wait_for(stream.receive(LIMITS), 30.0)
        assert kind is Kind.REJECT
    assert len(victim.rounds._inboxes.waiting) == MAX_STRANGERS
