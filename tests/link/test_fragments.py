"""The trainer's side of rounds of one fragment: what it copies, when it merges, which tokens it counts."""

from __future__ import annotations

import os

import pytest
import torch

from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import LocalAnchor
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Merged, Saved, Snapshot
from peer.link.supervisor import create_descriptor
from peer.link.sync import SwarmSync
from peer.outer.optim.optimizers import Sgd
from peer.outer.policy.merge_rules import Carry, Mix
from peer.outer.policy.schedules import Every, Strided
from tests.link.fakes import LINEAGE, MAPPED, NUMEL, PUSH, START, FakeAgent, Replica, Step

SIZES = (3, 4, 1)
STREAMING = Strided(period=12, num_fragments=3, overlap_steps=2)


class Peer:
    """A `SwarmSync` with fragments; a test plays its agent."""

    def __init__(self, descriptor, schedule=STREAMING, rule=Mix(alpha=0.5), sizes=SIZES):
        self.agent, self.replica = FakeAgent(), Replica()
        self.memory = SharedState(descriptor, NUMEL, 0, max(sizes, default=NUMEL))
        self.memory.anchor.copy_(torch.arange(NUMEL))
        local = LocalAnchor(self.memory, self.replica, Sgd(lr=1.0), rule, sizes)
        limits = Limits(rounds_total=None, max_rounds=None)
        connection = AgentConnection(self.agent, START, MAPPED)
        self.sync = SwarmSync(connection, local, schedule, limits, lambda _: None, lambda: 0.0)
        self.sync.begin(Anchor(round=0, lineage_id=LINEAGE, contributed=None))

    def steps(self, count):
        for _ in range(count):
            self.replica.flat += PUSH
            self.sync.after_step(Step())

    def sent(self):
        return [(message.sequence, message.tokens) for message in self.agent.take(Snapshot)]

    def commit(self, round, contributed, fragment, shift, own):
        self.memory.anchor[own] += shift
        self.agent.inbox.append(
            Anchor(round=round, lineage_id=LINEAGE, contributed=contributed, fragment=fragment)
        )


@pytest.fixture
def descriptor():
    descriptor = create_descriptor()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def peer(descriptor):
    return Peer(descriptor)


def test_fragments_are_sent_one_after_the_other_each_with_its_own_tokens(peer):
    rounds = [(1, 40), (2, 80), (0, 120), (1, 120), (2, 120)]
    for sequence, (fragment, tokens) in enumerate(rounds, 1):
        peer.steps(4 if sequence == 1 else 2)
        assert peer.sent() == [(sequence, tokens)]
        start, stop = (0, 3, 7)[fragment], (3, 7, 8)[fragment]
        assert torch.equal(peer.memory.snapshot[: stop - start], peer.replica.flat[start:stop])
        peer.commit(sequence, sequence, fragment, 8.0, slice(start, stop))
        peer.steps(2)
    assert peer.sync.step == 4 * 5 + 2
    assert peer.sync.round == 5


def test_a_result_is_merged_by_the_rule_and_not_before_its_time(peer):
    peer.steps(4)
    peer.commit(1, 1, 1, 8.0, slice(3, 7))
    before = peer.replica.flat.clone()
    peer.steps(1)
    assert torch.equal(peer.replica.flat, before + PUSH)
    assert (peer.sync.round, peer.agent.take(Merged)[1:]) == (0, [])
    peer.steps(1)
    expected = before + 2 * PUSH
    expected[3:7] = 0.5 * expected[3:7] + 0.5 * (torch.arange(3.0, 7.0) + 8.0)
    assert torch.equal(peer.replica.flat, expected)
    assert (peer.sync.round, peer.sync.steps_since_snapshot) == (1, 2)
    assert torch.equal(peer.sync.anchor, peer.memory.anchor)
    assert [message.round for message in peer.agent.take(Merged)] == [1]


def test_a_late_result_is_merged_when_it_has_come_and_a_missed_one_at_once(peer):
    peer.steps(9)
    peer.commit(1, 1, 1, 8.0, slice(3, 7))
    peer.steps(1)
    assert peer.sync.round == 1
    assert peer.sent() == [(1, 40), (2, 100)]  # what was due meanwhile
    peer.commit(2, None, 2, 1.0, slice(7, 8))  # others made the round without this peer
    local = peer.replica.flat.clone()
    peer.steps(1)
    expected = local + PUSH
    expected[7] += 1.0  # with the anchor: nothing of this peer is in it, and nothing is mixed away
    assert torch.equal(peer.replica.flat, expected)
    assert peer.sent() == [(3, 110)]  # of fragment 0, at once


def test_fragments_that_are_as_they_were_are_not_merged_after_a_catch_up(peer):
    peer.steps(2)
    local = peer.replica.flat.clone()
    peer.commit(4, None, None, 2.0, slice(0, 3))
    peer.sync.poll()
    local[:3] += 2.0
    assert torch.equal(peer.replica.flat, local)


def test_a_checkpoint_merges_what_waits_so_that_parameters_and_state_are_of_one_round(peer):
    peer.steps(4)
    peer.commit(1, 1, 1, 8.0, slice(3, 7))
    peer.agent.inbox.append(Saved(path="x", round=1, lineage_id=LINEAGE))
    peer.sync.poll()
    assert peer.sync.progress()["round"] == 1
    assert peer.sync.progress()["unsent_tokens"] == [40, 0, 40]


@pytest.mark.parametrize("overlap", [2, 4])
def test_whole_rounds_may_overlap_with_the_steps_that_follow(descriptor, overlap):
    peer = Peer(descriptor, Every(steps=4, overlap_steps=overlap), Carry(), ())
    peer.steps(4)
    snapshot = peer.replica.flat.clone()
    peer.commit(1, 1, 0, 8.0, slice(0, NUMEL))
    peer.steps(overlap - 1)
    assert (peer.sync.round, peer.sent()) == (0, [(1, 40)])
    peer.steps(1)
    assert peer.sync.round == 1
    assert torch.equal(peer.replica.flat, peer.memory.anchor + overlap * PUSH)
    assert torch.equal(snapshot + overlap * PUSH - snapshot, torch.full((NUMEL,), overlap * PUSH))
    peer.steps(4 - overlap)
    assert peer.sent() == [(2, 40)]  # one round late: at the very step of the merge, with what was made since


def test_progress_that_is_not_finite_is_dropped_but_for_what_was_sent(peer):
    peer.steps(4)
    sent = peer.memory.snapshot.clone()
    peer.replica.flat.fill_(torch.nan)
    peer.sync.after_step(Step(loss=torch.nan))
    assert torch.equal(peer.replica.flat[3:7], sent)
    assert torch.equal(peer.replica.flat[:3], torch.arange(3.0))


LONG = Strided(period=12, num_fragments=3, overlap_steps=7)  # a fragment is sent every 4 steps


def waiting(descriptor, rule=None):
    """A peer that has sent fragments 1 and 2 at steps 4 and 8 and has their anchors; it merges them at 11 and 15."""
    peer = Peer(descriptor, LONG, rule or Mix(alpha=0.5))
    peer.steps(4)
    peer.commit(1, 1, 1, 8.0, slice(3, 7))
    peer.steps(4)
    peer.commit(2, 2, 2, 5.0, slice(7, 8))
    peer.steps(1)
    return peer


def mixed(local, own, anchor):
    local[own] = 0.5 * local[own] + 0.5 * anchor
    return local


def test_a_fragment_is_sent_before_the_one_before_it_is_merged(descriptor):
    peer = waiting(descriptor)
    assert peer.sent() == [(1, 40), (2, 80)]
    assert [message.round for message in peer.agent.take(Merged)] == [0, 1, 2]  # the agent may write the next anchor
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 9 * PUSH)
    assert torch.equal(peer.sync.anchor, peer.memory.anchor)
    peer.steps(1)
    local = peer.replica.flat + PUSH
    peer.steps(1)  # the eleventh
    assert torch.equal(peer.replica.flat, mixed(local, slice(3, 7), torch.arange(3.0, 7.0) + 8.0))
    peer.steps(3)
    assert peer.sent() == [(3, 120)]  # at the twelfth
    assert peer.replica.flat[7] == 7.0 + 14 * PUSH
    local = peer.replica.flat + PUSH
    peer.steps(1)  # the fifteenth
    assert torch.equal(peer.replica.flat, mixed(local, slice(7, 8), torch.tensor([7.0 + 5.0])))


def test_steps_while_a_fragment_waits_are_kept_by_a_rule_that_carries(descriptor):
    peer = waiting(descriptor, Carry())
    peer.steps(2)
    expected = torch.arange(NUMEL) + 11 * PUSH
    expected[3:7] += 8.0 - 4 * PUSH  # the new anchor in the place of what was sent
    assert torch.equal(peer.replica.flat, expected)


def test_a_checkpoint_merges_all_that_waits(descriptor):
    peer = waiting(descriptor)
    local = peer.replica.flat.clone()
    peer.agent.inbox.append(Saved(path="x", round=2, lineage_id=LINEAGE))
    peer.sync.poll()
    expected = mixed(mixed(local, slice(3, 7), torch.arange(3.0, 7.0) + 8.0), slice(7, 8), torch.tensor([12.0]))
    assert torch.equal(peer.replica.flat, expected)
    peer.steps(8)
    assert torch.equal(peer.replica.flat, expected + 8 * PUSH)  # once


def test_what_waits_is_merged_before_a_state_that_was_caught_up_with(descriptor):
    peer = waiting(descriptor)
    local = peer.replica.flat.clone()
    peer.commit(7, None, None, 2.0, slice(0, NUMEL))
    peer.sync.poll()
    expected = mixed(mixed(local, slice(3, 7), torch.arange(3.0, 7.0) + 8.0), slice(7, 8), torch.tensor([12.0]))
    assert torch.equal(peer.replica.flat, expected + 2.0)
    assert peer.sync.round == 7


def test_progress_that_is_not_finite_is_replaced_by_the_anchor_also_where_that_waits(descriptor):
    peer = waiting(descriptor)
    peer.replica.flat.fill_(torch.nan)
    peer.sync.after_step(Step(loss=torch.nan))
    assert torch.equal(peer.replica.flat, peer.memory.anchor)
    peer.replica.flat += PUSH
    peer.steps(6)
    assert torch.equal(peer.replica.flat, peer.memory.anchor + 7 * PUSH)  # nothing is merged a second time


def test_what_waits_is_merged_at_its_step_also_without_an_agent(descriptor):
    peer = waiting(descriptor)
    peer.agent.die()
    peer.steps(1)
    local = peer.replica.flat + PUSH
    peer.steps(1)
    assert torch.equal(peer.replica.flat, mixed(local, slice(3, 7), torch.arange(3.0, 7.0) + 8.0))


def test_a_contribution_that_the_next_agent_or_a_catch_up_tells_of_is_merged_at_once(descriptor):
    peer = Peer(descriptor, LONG)
    peer.steps(4)
    local = peer.replica.flat.clone()
    peer.commit(1, 1, None, 8.0, slice(3, 7))
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, mixed(local, slice(3, 7), torch.arange(3.0, 7.0) + 8.0))
    peer.steps(4)
    assert peer.sent() == [(1, 40), (2, 80)]  # in time


def test_an_agent_that_tells_of_the_same_state_merges_nothing_early(descriptor):
    peer = waiting(descriptor)
    local = peer.replica.flat.clone()
    peer.commit(2, None, None, 0.0, slice(0, NUMEL))
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, local)
    peer.commit(3, None, None, 2.0, slice(3, 7))  # what waits of this fragment, and then the news
    peer.sync.poll()
    expected = mixed(local, slice(3, 7), torch.arange(3.0, 7.0) + 8.0)
    expected[3:7] += 2.0
    assert torch.equal(peer.replica.flat, expected)
