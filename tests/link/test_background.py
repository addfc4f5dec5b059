"""A device whose copies take time: steps are made meanwhile, and nothing is lost or told too early."""

from __future__ import annotations

import math
import os

import pytest
import torch

from peer.link.messages import Merged, Snapshot, WantSnapshot
from peer.link.supervisor import create_descriptor
from tests.link.fakes import NUMEL, PUSH, STEPS, Peer, Step

SPOILT = Step(tokens=0, loss=math.nan, grad_norm=math.nan)


class Slow:
    """Copies that end when the test lets them, or when they are waited for."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.ended, self.waits = peer, False, 0
        self._finish = lambda: None

    def begin_read(self, out, start):
        held = self.peer.replica.flat[start : start + len(out)].clone()
        return self._begin(lambda: out.copy_(held))

    def begin_carry(self, before, after, _start):
        self.brought = []
        return self._begin(lambda: self.brought.extend((before.clone(), after.clone())))

    def carry(self):
        before, after = self.brought
        self.peer.replica.flat.copy_(after + (self.peer.replica.flat - before))

    def _begin(self, finish):
        self.ended, self._finish = False, finish
        return self

    def done(self):
        return self.ended

    def result(self):
        if not self.ended:
            self.waits += 1
        self.ended = True
        self._finish()


@pytest.fixture
def peer():
    descriptor = create_descriptor()
    peer = Peer(descriptor)
    peer.slow = peer.sync._local.copies = Slow(peer)
    yield peer.begin()
    os.close(descriptor)


def test_a_snapshot_is_told_when_it_is_there_and_is_of_when_it_was_due(peer):
    peer.steps(STEPS)
    peer.steps(2)
    assert peer.agent.take(Snapshot) == []
    peer.slow.ended = True
    peer.steps(1)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10 * STEPS)]
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL) + PUSH * STEPS)
    assert peer.slow.waits == 0


def test_an_anchor_is_taken_when_the_device_has_it_with_the_steps_made_meanwhile(peer):
    peer.steps(STEPS)
    peer.slow.ended = True
    peer.steps(1)
    peer.agent.take(Merged)
    peer.commit(shift=8.0, contributed=1)
    peer.steps(1)
    assert peer.sync.round == 0
    assert peer.agent.take(Merged) == [], "the agent must not write the next anchor yet"
    peer.steps(3)
    peer.slow.ended = True
    peer.steps(1)
    assert peer.sync.round == 1
    assert peer.agent.take(Merged) == [Merged(round=1)]
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 8.0 + PUSH * 6)
    assert peer.sync.steps_since_snapshot == 6
    assert peer.slow.waits == 0


def test_a_wish_or_an_anchor_waits_for_the_snapshot_that_is_under_way(peer):
    peer.steps(STEPS)
    peer.agent.inbox.append(WantSnapshot(after=0))
    peer.steps(1)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10 * STEPS)], "and no other"
    assert peer.slow.waits == 1


def test_a_snapshot_of_bad_numbers_is_never_told(peer):
    peer.steps(STEPS)
    peer.replica.flat[0] = math.nan
    peer.sync.after_step(SPOILT)
    (snapshot,) = peer.agent.take(Snapshot) or [None]
    assert snapshot is None
    peer.slow.ended = True
    peer.steps(1)
    (snapshot,) = peer.agent.take(Snapshot)
    assert snapshot.tokens == 1
    assert bool(peer.memory.snapshot.isfinite().all())


def test_an_agent_that_dies_meanwhile_is_told_nothing_and_the_next_one_hears_of_a_new_snapshot(peer):
    peer.steps(STEPS)
    peer.agent.die()
    peer.steps(1)
    assert peer.agent.take(Snapshot) == []
    peer.agent.dead = False
    peer.agent.running = True
    peer.commit(shift=0.0, contributed=None)
    peer.steps(1)
    peer.slow.ended = True
    peer.steps(1)
    peer.slow.ended = True
    peer.steps(1)
    assert [message.sequence for message in peer.agent.take(Snapshot)] == [1]
