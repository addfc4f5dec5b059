"""What becomes of local parameters at a new anchor, as the recipe's merge rule says; and of a second trajectory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from peer.link.messages import Snapshot
from peer.link.second_trajectory import SecondTrajectory
from peer.link.supervisor import create_descriptor
from peer.outer.policy.merge_rules import Carry, Eager, Elastic, Keep, MergeRule, Mix
from tests.link.fakes import NUMEL, PUSH, STEPS, Peer, Replica, Step

START = torch.arange(NUMEL).float()
SENT = STEPS * PUSH
MakePeer = Callable[..., Peer]


@pytest.fixture
def make() -> Iterator[MakePeer]:
    descriptors: list[int] = []

    def build(**options: object) -> Peer:
        descriptors.append(create_descriptor())
        return Peer(descriptors[-1], **options)

    yield build
    for descriptor in descriptors:
        os.close(descriptor)


def test_rounds_without_a_peer_that_keeps_its_own_leave_its_parameters_until_they_are_too_many(make: MakePeer) -> None:
    peer = make(merge=Keep(kept_rounds=2)).begin()
    peer.steps(STEPS)
    for number in (1, 2):
        peer.commit(shift=-8.0, contributed=None, round=number)
        peer.sync.poll()
        assert torch.equal(peer.replica.flat, START + SENT)
        assert torch.equal(peer.sync.anchor, START - 8.0 * number)
    peer.commit(shift=-8.0, contributed=None, round=3)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, START + SENT - 8.0)  # with the anchor from here on
    peer.steps(1)
    sent = peer.sync._ledger.outstanding
    peer.commit(shift=1.0, contributed=sent, round=4)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, START - 23.0)


@pytest.mark.parametrize(("merge", "moved"), [
    (Carry(), -8.0),
    (Mix(alpha=0.75), 0.75 * SENT - 0.25 * 8.0),  # three quarters of the parameters, one of the anchor
    (Mix(alpha=1.0), SENT),
    (Elastic(a=0.25), 0.75 * SENT),  # towards the anchor before
    (Elastic(a=0.0), SENT),
], ids=repr)
def test_what_was_sent_is_merged_as_the_recipe_says(make: MakePeer, merge: MergeRule, moved: float) -> None:
    peer = make(merge=merge).begin()
    peer.steps(STEPS)
    peer.commit(shift=-8.0, contributed=1)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, START + moved)
    peer = make(merge=merge).begin()
    peer.steps(STEPS + 3)
    peer.commit(shift=-8.0, contributed=1)
    peer.sync.poll()
    since = 3 * PUSH * (merge.alpha if isinstance(merge, Mix) else 1.0)
    assert torch.equal(peer.replica.flat, START + moved + since)


@pytest.mark.parametrize("merge", [Carry(), Mix(alpha=0.75), Elastic(a=0.25)], ids=repr)
def test_after_a_missed_round_the_parameters_move_with_the_anchor(make: MakePeer, merge: MergeRule) -> None:
    peer = make(merge=merge).begin()
    peer.steps(STEPS)
    peer.commit(shift=16.0, contributed=None)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, START + 16.0 + SENT)


def test_an_eager_peer_starts_from_its_share_and_sends_again_what_no_round_held(make: MakePeer) -> None:
    peer = make(merge=Eager()).begin()
    peer.sync.poll()
    peer.steps(STEPS)
    early = 0.7 * 1.9 * SENT  # Nesterov's first step, and it is alone
    torch.testing.assert_close(peer.replica.flat, START + early)
    assert torch.equal(peer.memory.snapshot, START + SENT)
    peer.commit(shift=16.0, contributed=None)
    peer.sync.poll()
    torch.testing.assert_close(peer.replica.flat, START + 16.0 + early)
    peer.steps(1)  # it is due
    torch.testing.assert_close(peer.memory.snapshot, START + 16.0 + SENT + PUSH)
    peer.commit(shift=8.0, contributed=peer.agent.take(Snapshot)[-1].sequence, round=2)
    peer.sync.poll()
    peer.steps(STEPS)
    torch.testing.assert_close(peer.memory.snapshot, START + 24.0 + SENT)

    kept = peer.replica.flat.clone()
    peer.replica.flat += math.nan
    peer.sync.after_step(Step(loss=math.nan))
    assert torch.equal(peer.replica.flat, kept)  # as it was when it sent


class Twins:
    """A peer whose second parameters make the same steps."""

    def __init__(self, make: MakePeer) -> None:
        self.replica = Replica()
        self.second = SecondTrajectory(self.replica, 0.5, NUMEL)
        self.peer = make(second=self.second)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.peer.replica.flat += PUSH
            self.replica.flat += 2 * PUSH
            self.peer.sync.after_step(Step())


@pytest.fixture
def twins(make: MakePeer) -> Twins:
    twins = Twins(make)
    twins.peer.begin()
    return twins


def test_half_of_the_second_delta_is_subtracted_from_what_is_sent(twins: Twins) -> None:
    twins.steps(STEPS)
    assert torch.equal(twins.peer.memory.snapshot, START + SENT - 0.5 * 2 * SENT)


def test_the_second_trajectory_follows_one_anchor_behind(twins: Twins) -> None:
    twins.steps(STEPS + 1)
    twins.peer.commit(shift=-8.0, contributed=1)
    twins.peer.sync.poll()
    assert torch.equal(twins.peer.replica.flat, START - 8.0 + PUSH)
    assert torch.equal(twins.replica.flat, START + 2 * PUSH)
    twins.steps(STEPS - 1)
    twins.peer.commit(shift=-8.0, contributed=2, round=2)
    twins.peer.sync.poll()
    assert torch.equal(twins.peer.memory.snapshot, START - 8.0 + SENT - 0.5 * 2 * SENT)
    assert torch.equal(twins.replica.flat, START - 8.0)
    twins.steps(1)
    twins.peer.commit(shift=-8.0, contributed=None, round=3)  # made without this peer: both keep their step
    twins.peer.sync.poll()
    assert torch.equal(twins.peer.replica.flat, START - 24.0 + PUSH)
    assert torch.equal(twins.replica.flat, START - 16.0 + 2 * PUSH)


def test_progress_that_is_not_finite_is_dropped_from_both(twins: Twins) -> None:
    twins.steps(STEPS - 1)
    twins.replica.flat.fill_(math.nan)
    twins.steps(1)
    assert torch.equal(twins.peer.replica.flat, START)
    assert torch.equal(twins.replica.flat, START)
    assert torch.equal(twins.peer.memory.snapshot, START)
    assert twins.peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=1)]
    twins.peer.sync._count(Step(loss=math.nan))
    twins.peer.replica.flat.fill_(math.nan)
    twins.peer.sync._count(Step(loss=math.nan))
    assert torch.equal(twins.peer.replica.flat, START)


def test_both_trajectories_continue_after_a_resume(twins: Twins, make: MakePeer) -> None:
    twins.steps(STEPS)
    twins.peer.commit(shift=-8.0, contributed=1)
    twins.steps(1)
    progress, tensors = twins.peer.sync.progress(), twins.peer.sync.tensors()
    again = Twins(make)
    again.peer.memory.anchor.copy_(twins.peer.memory.anchor)
    again.peer.replica.flat.copy_(twins.peer.replica.flat)
    again.peer.sync.resume(progress, tensors)
    again.peer.begin(round=1)
    assert torch.equal(again.replica.flat, twins.replica.flat)
    for each in (twins, again):
        each.steps(STEPS - 1)
        assert torch.equal(each.peer.memory.snapshot, twins.peer.memory.snapshot)
    assert float(again.peer.memory.snapshot[0]) == -8.0
