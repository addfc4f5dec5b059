"""A swarm whose every duration is a tenth does the same in a tenth of the time."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import replace

import pytest
import torch

from peer.link.messages import Anchor, Progress, RoundEnded, Snapshot, WantSnapshot
from peer.outer.recipe.plan import RunPlan
from peer.protocol.identity import Identity
from peer.protocol.manifest import DataSpec, InnerSpec, ModelSpec, RecipeSpec, RoundSpec, RunManifest
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.history_server import HistoryServer
from peer.swarm.lineage.round_loop import LineageRounds
from peer.swarm.loop import RunContext
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.store import StateStore
from tests.swarm.network import MemoryNetwork
from tests.swarm.played import genesis_memory, state_in
from tests.swarm.runs import make_state
from tests.swarm.virtual_time import VirtualTimeLoop

COUNT = 4
TRAIN_S = (20.0, 21.0, 22.0, 23.0)  # from an anchor to a contribution
STEP_S = 0.5
SILENT_AFTER = 2  # rounds
TOKENS = 1000


class Records:
    """The records of the other peers, as they are at this moment."""

    fresh, gate = True, None

    def __init__(self, owner):
        self._owner = owner

    @property
    def peers(self):
        return {peer.node.peer_id: peer.record() for peer in self._owner.all_peers if peer is not self._owner}

    reachable = peers

    def record(self, peer_id):
        return self.peers.get(peer_id)

    def made_within(self, seconds):  # noqa: ARG002
        others = (peer for peer in self._owner.all_peers if peer is not self._owner)
        return {peer.node.peer_id for peer in others if not peer.silent}

    async def refresh(self):
        """They are new already."""

    def announce_soon(self):
        """They are seen already."""


class TrainingPeer:
    """Production rounds; its trainer and its directory are played.

    Attributes:
        events: (seconds, this peer's number, what its round came to, the group's numbers), shared by all peers.
        silent: its machine takes streams and says nothing any more.
    """

    def __init__(self, all_peers, number, node, manifest, folder, factor, events):
        self.all_peers, self.number, self.node, self.factor, self.events = all_peers, number, node, factor, events
        self.silent, self._sequence, self._training = False, 0, None
        self.loop = asyncio.get_running_loop()
        memory = genesis_memory()
        state = state_in(memory)
        self.store = StateStore(memory, state, ChainStore(folder, manifest.genesis), node.timing)
        self.store.restore([])
        self.directory = Records(self)
        context = RunContext(
            node=node, directory=self.directory, organiser=node.peer_id,
            trainer=self, rng=random.Random(number), plan=replace(RunPlan.of(manifest), nominal_tokens=TOKENS),
        )  # fmt: skip
        self.rounds = LineageRounds(context, self.store)
        self.rounds.slot.reports.clock = node.clock

    def record(self):
        position = self.rounds.position()
        return PeerRecord(
            run_id=self.rounds._manifest.run_id, nickname="x", state="training", round=position.round,
            lineage_id=position.lineage_id, lineage_weight=position.weight, expires_at=1e10,
        )  # fmt: skip

    def tell(self, message):
        if isinstance(message, RoundEnded):
            record, numbers = message.record, {peer.node.peer_id: peer.number for peer in self.all_peers}
            group = sorted(numbers[peer_id] for peer_id in record.members)
            self.events.append((self.loop.time(), self.number, record.status, record.phase, record.round, group))
        elif isinstance(message, Anchor):
            self.loop.call_soon(self.rounds.slot.on_merged)
            self._train(TRAIN_S[self.number])
        elif isinstance(message, WantSnapshot):
            self._train(STEP_S)

    def _train(self, seconds):
        """Contribute in so many seconds, in place of what was to be contributed before."""
        if self._training is not None:
            self._training.cancel()
        due_in_s = self.factor * seconds
        self.rounds.slot.on_progress(Progress(
            step=0, tokens=0, tokens_per_s=TOKENS / TRAIN_S[self.number] / self.factor, loss=None, due_in_s=due_in_s,
            unsent_tokens=0, seconds_waiting=0.0,
        ))  # fmt: skip
        self._training = self.loop.call_later(due_in_s, self._contribute)

    def _contribute(self):
        if self.silent:
            return
        self._sequence += 1
        generator = torch.Generator().manual_seed(100 * self.number + self._sequence)
        memory = self.store.memory
        memory.snapshot.copy_(memory.anchor + 0.01 * torch.randn(len(memory.anchor), generator=generator))
        self.rounds.slot.on_snapshot(Snapshot(sequence=self._sequence, tokens=TOKENS))

    async def start(self):
        await self.rounds.start()
        cache, history = self.store.snapshot_cache, self.store.history
        await HistoryServer(self.node, self.rounds._manifest.run_id, history, cache, cache.priority).start()

    async def run(self):
        await self.rounds.join(None)
        await self.rounds.run()

    async def fall_silent(self, network):
        """Its streams stay, and others are taken; nothing is said on them."""
        self.silent = True

        async def say_nothing(*_):
            await asyncio.Event().wait()

        handlers = network.hosts[self.node.peer_id].handlers
        handlers.update(dict.fromkeys(handlers, say_nothing))


async def rounds_of(identities, folder, factor, silent, rounds):
    """What all peers of a swarm came to, until those that speak have made so many rounds; -> (events, digests)."""
    timing, loop = STANDARD.scaled(factor), asyncio.get_running_loop()
    network, events, all_peers = MemoryNetwork(timing, loop.time), [], []
    manifest = RunManifest(
        name="a", model=ModelSpec(architecture="llama"), data=DataSpec(), inner=InnerSpec(),
        recipe=RecipeSpec(name="opendiloco", compressor="int8"), genesis=make_state().lineage_id,
        rounds=RoundSpec(straggler_wait_s=10.0 * factor, timeout_s=60.0 * factor),
    )  # fmt: skip
    leads = {one: hashlib.sha256(f"{manifest.run_id} leads {one.peer_id}".encode()).digest() for one in identities}
    order = sorted(identities, key=leads.__getitem__)
    for number, identity in enumerate(order):
        node, place = network.node(identity), folder / f"{factor}" / str(number)
        all_peers.append(TrainingPeer(all_peers, number, node, manifest, place, factor, events))
    try:
        for peer in all_peers:
            await peer.start()
        running = [peer.node.spawn(peer.run()) for peer in all_peers]
        speaking = [peer for peer in all_peers if peer.number != silent]
        while min(peer.store.state.round for peer in speaking) < rounds:
            await asyncio.sleep(factor * 1.0)
            assert not any(task.done() for task in running)
            if not all_peers[silent].silent and all_peers[silent].store.state.round >= SILENT_AFTER:
                await all_peers[silent].fall_silent(network)
        events.sort(key=lambda event: (round(event[0] / factor, 6), event[1]))
        return events, [peer.store.state.digest() for peer in speaking]
    finally:
        await network.close()
        await cancel_and_wait(asyncio.all_tasks() - {asyncio.current_task()})


@pytest.mark.parametrize("silent", [pytest.param(0, marks=pytest.mark.long), 2], ids=["the leader", "a member"])
def test_a_tenth_of_all_durations_is_a_tenth_of_the_time(tmp_path, silent):
    identities = [Identity.generate() for _ in range(COUNT)]
    came_to = []
    for factor in (1.0, 0.1):
        loop = VirtualTimeLoop()
        try:
            came_to.append(loop.run_until_complete(rounds_of(identities, tmp_path, factor, silent, SILENT_AFTER + 2)))
        finally:
            loop.close()
    (slow, slow_states), (fast, fast_states) = came_to
    assert [event[1:] for event in fast] == [event[1:] for event in slow]
    assert [event[0] for event in fast] == pytest.approx([0.1 * event[0] for event in slow])
    assert len(set(slow_states)) == len(set(fast_states)) == 1
    next_round = ("committed", SILENT_AFTER + 1)
    commits = [(at, group) for at, _, status, _, round, group in slow if (status, round) == next_round]
    others = [number for number in range(COUNT) if number != silent]
    assert [group for _, group in commits] == [others] * len(others)
    waited_s = commits[0][0] - max(TRAIN_S) * (SILENT_AFTER + 1)
    assert waited_s > 10.0  # the straggler window, at least
