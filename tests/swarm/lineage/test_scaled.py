"""A swarm whose every duration is a tenth does the same in a tenth of the time."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from peer.protocol.identity import Identity
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.network import MemoryNetwork
from tests.swarm.training import Pace, TrainingPeer, manifest_of
from tests.swarm.virtual_time import VirtualTimeLoop

COUNT = 4
TRAIN_S = (20.0, 21.3, 22.1, 23.7)  # for a contribution; no two events at one time
STEP_S = 0.5
SILENT_AFTER = 2  # rounds


class Records:
    """The records of the other peers, as they are at this moment."""

    fresh, gate = True, None

    def __init__(self, owner):
        self._owner = owner

    @property
    def peers(self):
        return {peer.node.peer_id: peer.record(1e10) for peer in self._owner.all_peers if peer is not self._owner}

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


class SilentPeer(TrainingPeer):
    """One that may fall silent, and is seen by those of `all_peers`."""

    def __init__(self, all_peers, number, node, manifest, folder, factor, events):
        self.all_peers, self.events = all_peers, events
        pace = Pace(factor * TRAIN_S[number], factor * STEP_S)
        super().__init__(number, node, Records(self), manifest, folder, pace, heard=self._note)

    def _note(self, record):
        numbers = {peer.node.peer_id: peer.number for peer in self.all_peers}
        group = sorted(numbers[peer_id] for peer_id in record.members)
        self.events.append((self.loop.time(), self.number, record.status, record.phase, record.round, group))

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
    manifest = manifest_of(window_s=10.0 * factor, timeout_s=60.0 * factor)
    leads = {one: hashlib.sha256(f"{manifest.run_id} leads {one.peer_id}".encode()).digest() for one in identities}
    order = sorted(identities, key=leads.__getitem__)
    for number, identity in enumerate(order):
        node, place = network.node(identity), folder / f"{factor}" / str(number)
        all_peers.append(SilentPeer(all_peers, number, node, manifest, place, factor, events))
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
    began_s = min(TRAIN_S[number] for number in others) * (SILENT_AFTER + 1)
    assert commits[0][0] - began_s > 10.0  # the straggler window, at least
