from __future__ import annotations

import math
import os

import pytest
import torch

from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import LocalAnchor
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Progress, Snapshot, WantSnapshot
from peer.link.supervisor import create_descriptor
from peer.link.voting import VotingSync
from peer.outer.optim.optimizers import Sgd
from peer.outer.policy.schedules import GradientChange
from tests.link.fakes import LINEAGE, MAPPED, NUMEL, PUSH, START, FakeAgent, Replica, Step

SMOOTHING = 3  # the average moves by half of a change


class Peer:
    """A `VotingSync`; the test plays its agent, and says what gradients it finds."""

    def __init__(self, descriptor):
        self.agent, self.replica, self.heard = FakeAgent(), Replica(), []
        self.memory = SharedState(descriptor, NUMEL, 0)
        self.memory.anchor.copy_(torch.arange(NUMEL))
        self.sync = VotingSync(
            GradientChange(delta=0.3, smoothing=SMOOTHING), agent=AgentConnection(self.agent, START, MAPPED),
            local=LocalAnchor(self.memory, self.replica, Sgd(lr=1.0)),
            limits=Limits(rounds_total=None, max_rounds=None), on_message=self.heard.append, clock=lambda: 0.0,
        )

    def begin(self, round=0):
        self.sync.begin(Anchor(round=round, lineage_id=LINEAGE, contributed=None))
        return self

    def steps(self, *norms):
        for norm in norms:
            self.replica.flat += PUSH
            self.sync.after_step(Step(grad_norm=norm))
        return self.agent.take(Snapshot)

    def commits(self, contributed):
        """The round of this contribution is committed: the anchor is where this peer stood."""
        self.memory.anchor.copy_(self.memory.snapshot)
        self.agent.inbox.append(Anchor(round=self.sync.round + 1, lineage_id=LINEAGE, contributed=contributed))


@pytest.fixture
def peer():
    descriptor = create_descriptor()
    yield Peer(descriptor)
    os.close(descriptor)


def test_every_step_of_the_warm_up_is_handed_over(peer):
    peer.begin()
    for number in range(1, SMOOTHING + 1):
        assert peer.steps(1.0) == [Snapshot(sequence=number, tokens=10)]
        peer.commits(number)
    assert peer.steps(1.0, 1.0, 1.0) == []
    assert (peer.sync.round, peer.sync.rounds_contributed) == (SMOOTHING, SMOOTHING)


def test_a_round_is_called_for_when_the_norm_changes_by_delta(peer):
    peer.begin(round=100)
    assert peer.steps(1.0, 1.0, 1.5, 1.25) == []  # 1, 1, 1.25, 1.25: a quarter
    assert peer.steps(2.1) == [Snapshot(sequence=1, tokens=50)]  # 1.675: a third
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL) + 5 * PUSH)


def test_a_vote_in_the_middle_of_a_round_is_for_the_next_one(peer):
    peer.begin(round=100)
    assert len(peer.steps(1.0, 3.0)) == 1
    assert peer.steps(9.0, 5.5) == []  # a snapshot is under way
    peer.commits(1)
    assert peer.steps(5.5) == [Snapshot(sequence=2, tokens=30)]
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 5 * PUSH)  # nothing trained meanwhile is lost


def test_whoever_is_called_hands_over_what_it_has_or_after_its_next_step(peer):
    peer.begin(round=100)
    peer.steps(1.0, 1.0)
    peer.agent.inbox.append(WantSnapshot(after=0))
    assert peer.steps(1.0) == [Snapshot(sequence=1, tokens=30)]
    peer.commits(1)
    peer.agent.inbox.append(WantSnapshot(after=1))
    peer.sync.poll()  # it has merged, and made no step yet
    assert peer.agent.take(Snapshot) == []
    assert peer.steps(1.0) == [Snapshot(sequence=2, tokens=10)]
    peer.agent.inbox.append(WantSnapshot(after=2))  # that round has failed
    assert peer.steps(1.0) == [Snapshot(sequence=3, tokens=20)]


def test_a_call_that_led_to_no_round_stands_and_an_answer_to_one_does_not(peer):
    peer.begin(round=100)
    assert len(peer.steps(1.0, 3.0)) == 1
    peer.commits(None)  # the others made a round, and this peer caught up
    assert peer.steps(2.0) == [Snapshot(sequence=2, tokens=30)]
    peer.commits(2)
    peer.agent.inbox.append(WantSnapshot(after=2))
    assert len(peer.steps(2.0)) == 1
    peer.commits(None)
    assert peer.steps(2.0, 2.0) == []


def test_a_newcomer_does_not_call_for_another_warm_up(peer):
    peer.begin(round=2)
    assert len(peer.steps(1.0)) == 1
    peer.commits(1)
    assert peer.steps(1.0, 1.0) == []


def test_a_resumed_peer_goes_on_with_the_average_that_it_had(peer):
    peer.begin(round=100)
    peer.steps(1.0, 1.5)
    saved = peer.sync.progress()
    assert (saved["votes"], saved["smoothed_norm"], saved["calls"]) == (SMOOTHING + 2, 1.25, False)
    descriptor = create_descriptor()
    again = Peer(descriptor)
    again.sync.resume(saved)
    again.begin(round=100)
    assert again.steps(1.25) == []
    assert len(again.steps(2.1)) == 1
    assert again.sync.global_step == 4.0
    waiting = again.sync.progress()  # its round is not committed
    third = Peer(descriptor)
    third.sync.resume(waiting)
    third.begin(round=100)
    assert len(third.steps(2.1)) == 1
    os.close(descriptor)


def test_a_skipped_step_is_no_vote(peer):
    peer.begin(round=100)
    assert peer.steps(1.0, math.nan, math.inf, 1.0) == []


def test_when_the_next_contribution_will_be_due_nobody_knows(peer):
    peer.begin(round=100)
    peer.steps(1.0)
    assert [message.due_in_s for message in peer.agent.take(Progress)] == [None]
