from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import LocalAnchor
from peer.link.lockstep import LockstepSync
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Mapped, Merged, Progress, Published, Snapshot, WantSnapshot
from peer.link.supervisor import create_descriptor
from peer.outer.optim.optimizers import SignSgd
from peer.outer.policy.schedules import Every
from tests.link.fakes import LINEAGE, MAPPED, NUMEL, START, FakeAgent, Replica, Step


class SwarmAgent(FakeAgent):
    """Answers every snapshot with what its test has planned for it: a list of calls, one for each."""

    def __init__(self):
        super().__init__()
        self.plan = []

    def send(self, message):
        super().send(message)
        if isinstance(message, Snapshot) and self.plan:
            self.plan.pop(0)(message)


class Peer:
    """A `LockstepSync` whose gradient is the number of the step."""

    def __init__(self, descriptor, overlap=0):
        self.agent, self.replica, self.heard, self.pauses = SwarmAgent(), Replica(), [], []
        self.memory = SharedState(descriptor, NUMEL, 0)
        self.memory.anchor.copy_(torch.arange(NUMEL))
        self.taken, self.stops_after, self.looks = 0, 10**6, 0
        self.sync = LockstepSync(
            self, pause=self.pauses.append, agent=AgentConnection(self.agent, START, MAPPED),
            local=LocalAnchor(self.memory, self.replica, SignSgd(lr=1.0)),
            schedule=Every(steps=1, overlap_steps=overlap),
            limits=Limits(rounds_total=None, max_rounds=None, stopping=self.stopping), on_message=self.heard.append,
            clock=lambda: 0.0,
        )
        self.sync.begin(Anchor(round=0, lineage_id=LINEAGE, contributed=None))

    def take(self, out):
        self.taken += 1
        out.fill_(self.sync.step)

    def stopping(self):
        self.looks += 1
        return self.looks > self.stops_after

    def commits(self, message):
        """The round of this gradient is committed: the anchor moves by it."""
        self.memory.anchor -= self.memory.snapshot
        self.moves(message.sequence)

    def moves(self, contributed):
        round = self.sync.round + 1
        self.agent.inbox.append(Anchor(round=round, lineage_id=LINEAGE, contributed=contributed))


@pytest.fixture
def peer():
    descriptor = create_descriptor()
    yield Peer(descriptor)
    os.close(descriptor)


def test_each_step_waits_for_the_anchor_that_its_gradient_leads_to(peer):
    peer.agent.plan = [peer.commits] * 3
    for number in range(1, 4):
        peer.sync.after_step(Step())
        assert (peer.sync.round, peer.sync.rounds_contributed) == (number, number)
        assert torch.equal(peer.replica.flat, peer.memory.anchor)
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) - 6.0)  # 1 + 2 + 3
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=number, tokens=10) for number in (1, 2, 3)]
    assert peer.agent.take(Merged) == [Merged(round=number) for number in range(4)]
    assert (peer.taken, peer.sync.dropped) == (3, 0)
    assert peer.sync.global_step == 3.0


def test_a_gradient_at_an_anchor_that_has_moved_is_dropped_with_its_tokens(peer):
    peer.agent.plan = [peer.commits]
    peer.moves(None)  # while the gradient was computed
    peer.sync.after_step(Step(tokens=7))
    assert peer.agent.take(Snapshot) == []
    assert (peer.taken, peer.sync.dropped, peer.sync.round) == (1, 1, 1)  # taken, so that no later step finds it
    assert not peer.memory.snapshot.any()
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]
    assert (peer.sync.round, peer.sync.rounds_contributed) == (2, 1)


def test_a_gradient_that_was_left_out_of_its_round_is_dropped(peer):
    peer.agent.plan = [lambda _: peer.moves(None), peer.commits]
    peer.sync.after_step(Step())
    assert (peer.sync.round, peer.sync.dropped, peer.sync.rounds_contributed) == (1, 1, 0)
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot)[-1] == Snapshot(sequence=2, tokens=10)
    assert peer.sync.rounds_contributed == 1


def test_after_a_failed_round_the_same_gradient_is_handed_over_again(peer):
    peer.agent.plan = [lambda message: peer.agent.inbox.append(WantSnapshot(after=message.sequence)), peer.commits]
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10), Snapshot(sequence=2, tokens=10)]
    assert (peer.taken, peer.sync.rounds_contributed) == (1, 1)
    assert torch.equal(peer.memory.snapshot, torch.ones(NUMEL))


def test_a_wish_before_the_gradient_is_there_hands_over_nothing_old(peer):
    peer.agent.plan = [peer.commits]
    peer.agent.inbox.append(WantSnapshot(after=0))
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]


def test_whoever_is_asked_to_stop_waits_for_nobody(peer):
    peer.stops_after = 3
    peer.sync.after_step(Step())
    assert peer.looks == 4
    assert peer.sync.round == 0
    assert len(peer.agent.take(Progress)) == 1


@pytest.fixture
def late_peer():
    descriptor = create_descriptor()
    yield Peer(descriptor, overlap=1)
    os.close(descriptor)


def test_with_overlap_the_next_gradient_is_computed_while_the_round_runs(late_peer):
    peer = late_peer
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]
    assert (peer.sync.round, peer.looks) == (0, 0)  # it did not wait
    assert peer.sync.rounds_before == 1  # of the next gradient
    peer.commits(Snapshot(sequence=1, tokens=10))
    peer.sync.after_step(Step(tokens=30))
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=2, tokens=30)]
    assert (peer.sync.round, peer.sync.rounds_contributed, peer.sync.dropped) == (1, 1, 0)
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) - 1.0)
    assert torch.equal(peer.memory.snapshot, torch.full((NUMEL,), 2.0))  # of the anchor before
    assert peer.sync.rounds_before == 2


def test_with_overlap_a_failed_round_is_tried_again_with_its_own_tokens(late_peer):
    peer = late_peer
    peer.sync.after_step(Step())
    peer.agent.plan = [peer.commits]
    peer.agent.inbox.append(WantSnapshot(after=1))
    peer.sync.after_step(Step(tokens=30))
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=number, tokens=tokens) for number, tokens in (
        (1, 10), (2, 10), (3, 30),
    )]
    assert (peer.taken, peer.sync.rounds_contributed) == (2, 1)


def test_with_overlap_a_gradient_of_two_anchors_ago_is_dropped(late_peer):
    peer = late_peer
    peer.sync.after_step(Step())
    peer.moves(None)
    peer.moves(None)
    peer.agent.inbox[-1] = Anchor(round=2, lineage_id=LINEAGE, contributed=None)
    peer.sync.after_step(Step(tokens=30))
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]
    assert (peer.sync.round, peer.sync.dropped, peer.sync.rounds_contributed) == (2, 2, 0)
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=2, tokens=10)]


def test_a_dead_agent_is_replaced_and_its_gradient_dropped_where_another_anchor_comes(peer):
    def dies(_):
        peer.agent.die()
        peer.agent.plan = []
        peer.agent.inbox.clear()
        revived = peer.agent.start

        def start():
            revived()
            peer.agent.dead = False
            published = Published(manifest={}, organiser="o", peer_id="p", nickname="n", maddrs=())
            peer.agent.inbox.extend([published, Anchor(round=5, lineage_id=LINEAGE, contributed=None)])

        peer.agent.start = start

    peer.agent.plan = [dies]
    peer.sync.after_step(Step())
    assert peer.agent.starts == 2
    assert peer.agent.take(Mapped) == [MAPPED]
    assert (peer.sync.round, peer.sync.dropped) == (5, 1)
    assert peer.pauses == []


def test_steps_that_no_agent_hears_of_are_not_made(peer):
    """From its death to the next one's anchor, whatever the new agent says meanwhile."""
    peer.agent.die()
    peer.agent.may_restart = False
    looks = []

    def stopping():
        looks.append(peer.agent.starts)
        if len(looks) == 3:
            peer.agent.may_restart = True
        if len(looks) == 5:
            peer.agent.dead = False
            peer.agent.inbox.append(Published(manifest={}, organiser="o", peer_id="p", nickname="n", maddrs=()))
        if len(looks) == 7:
            peer.moves(None)
        return False

    peer.sync.limits = replace(peer.sync.limits, stopping=stopping)
    peer.agent.plan = [peer.commits]
    peer.sync.after_step(Step())
    assert len(looks) >= 7
    assert (peer.sync.round, peer.sync.dropped, peer.taken) == (1, 1, 1)
    assert peer.agent.take(Snapshot) == []
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]


def test_whoever_comes_after_the_last_round_waits_for_nothing(peer):
    peer.sync.limits = Limits(rounds_total=0, max_rounds=None)
    peer.sync.after_step(Step())
    assert peer.sync.finished
    assert peer.agent.take(Snapshot) == []


def test_the_last_anchor_ends_the_wait(peer):
    peer.sync.limits = Limits(rounds_total=1, max_rounds=None)
    peer.agent.plan = [peer.commits]
    peer.sync.after_step(Step())
    assert peer.sync.finished


def test_after_a_resume_the_gradient_of_before_is_not_claimed(peer):
    peer.sync.resume({"round": 0, "step": 4, "tokens": 50, "steps_since_snapshot": 1, "unsent_tokens": [10]})
    peer.sync.begin(Anchor(round=0, lineage_id=LINEAGE, contributed=None))
    peer.agent.plan = [peer.commits]
    peer.sync.after_step(Step())
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]


def test_without_an_agent_it_pauses_between_looks(peer):
    def dies(_):
        peer.agent.die()
        peer.agent.may_restart = False
        peer.stops_after = peer.looks + 3

    peer.agent.plan = [dies]
    peer.sync.after_step(Step())
    assert len(peer.pauses) == 3
    assert peer.agent.starts == 1
