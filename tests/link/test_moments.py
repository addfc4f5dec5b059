"""Rounds without a step before them, such as those of moments: what a trainer hands over, and what it takes up."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch

from peer.link.ledger import MOMENTS_TOKENS
from peer.link.messages import Snapshot
from peer.link.supervisor import create_descriptor
from peer.outer.policy.moments import Desynced
from peer.outer.policy.schedules import Timer
from peer.protocol.weights import WeightRule
from tests.link.fakes import NUMEL, STEPS, Peer

MEANS = (torch.full((NUMEL,), 3.0), torch.full((NUMEL,), 7.0))


@pytest.fixture
def peer() -> Iterator[Peer]:
    descriptor = create_descriptor()
    peer = Peer(descriptor, moments=Desynced(first=1, second=2))
    peer.moments[0].flat.fill_(1.0)
    peer.moments[1].flat.fill_(2.0)
    for buffer, mean in zip(peer.memory.buffers, MEANS, strict=True):
        buffer.copy_(mean)
    yield peer.begin()
    os.close(descriptor)


def sent(peer: Peer) -> Snapshot:
    (snapshot,) = peer.agent.take(Snapshot)
    return snapshot


def test_moments_are_handed_over_at_once_and_hold_no_tokens_of_their_own(peer: Peer) -> None:
    peer.steps(STEPS)
    parameters = sent(peer)
    assert (parameters.tokens, peer.sync.steps_since_snapshot) == (10 * STEPS, STEPS)
    peer.commit(shift=1.0, contributed=parameters.sequence, fragment=0)
    peer.sync.poll()  # no step in between
    moments = sent(peer)
    assert (moments.tokens, moments.ranges) == (MOMENTS_TOKENS, "")
    assert torch.equal(peer.memory.snapshot, peer.moments[0].flat)

    peer.moments[0].flat += 0.5  # a step since
    local = peer.replica.flat.clone()
    peer.commit(shift=0.0, contributed=moments.sequence, round=2, fragment=0)
    peer.sync.poll()
    assert torch.equal(peer.moments[0].flat, MEANS[0] + 0.5)
    assert torch.equal(peer.moments[1].flat, torch.full((NUMEL,), 2.0))
    assert torch.equal(peer.replica.flat, local)
    assert peer.sync.round == 2
    assert not peer.agent.take(Snapshot), "the next round is of parameters, and has steps"
    peer.steps(STEPS)
    assert sent(peer).tokens == 10 * STEPS


def test_second_moments_follow_the_first_where_both_are_due(peer: Peer) -> None:
    for round in (1, 2, 3, 4):
        if round in (1, 3):
            peer.steps(STEPS)
        peer.commit(shift=0.0, contributed=sent(peer).sequence, round=round, fragment=0)
        peer.sync.poll()
    last = sent(peer)
    assert torch.equal(peer.memory.snapshot, torch.full((NUMEL,), 2.0))
    peer.commit(shift=0.0, contributed=last.sequence, round=5, fragment=0)
    peer.sync.poll()
    assert torch.equal(peer.moments[1].flat, MEANS[1])


def test_a_peer_that_a_round_of_moments_left_out_keeps_its_own(peer: Peer) -> None:
    peer.steps(STEPS)
    peer.commit(shift=0.0, contributed=sent(peer).sequence, fragment=0)
    peer.sync.poll()
    sent(peer)
    peer.commit(shift=0.0, contributed=None, round=2, fragment=0)
    peer.sync.poll()
    assert torch.equal(peer.moments[0].flat, torch.full((NUMEL,), 1.0))
    assert peer.sync.round == 2


def test_an_anchor_of_another_lineage_is_one_of_parameters(peer: Peer) -> None:
    peer.steps(STEPS)
    peer.commit(shift=0.0, contributed=sent(peer).sequence, fragment=0)
    peer.sync.poll()
    local, own = peer.replica.flat.clone(), sent(peer)
    peer.commit(shift=16.0, contributed=None, round=2)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, local + 16.0)
    assert torch.equal(peer.moments[0].flat, torch.full((NUMEL,), 1.0))
    assert peer.sync.rounds_contributed == 1
    assert own.tokens == MOMENTS_TOKENS


def test_moments_that_are_not_finite_are_dropped_before_they_are_sent(peer: Peer) -> None:
    peer.steps(STEPS)
    peer.moments[0].flat.fill_(math.nan)
    fresh = len(peer.fresh)
    peer.sync._on_drop = lambda: peer.moments[0].flat.zero_()
    peer.commit(shift=0.0, contributed=sent(peer).sequence, fragment=0)
    peer.sync.poll()
    sent(peer)
    assert (fresh, peer.sync.drops) == (0, 1)
    assert torch.equal(peer.memory.snapshot, torch.zeros(NUMEL))


def test_the_second_of_two_rounds_a_step_follows_the_first_at_once(peer: Peer) -> None:
    peer.sync.schedule = Timer(rate=2.0)
    peer.steps(1)
    for round in (1, 2):
        assert sent(peer).tokens == (10 if round == 1 else 1)
        peer.commit(shift=1.0, contributed=round, round=round)
        peer.sync.poll()
    assert not peer.agent.take(Snapshot)
    peer.steps(1)
    assert sent(peer).tokens == 10


def test_a_crowd_of_newcomers_has_no_more_than_its_share_of_the_moments() -> None:
    rule = WeightRule(probation_rounds=10, newcomers_thousandths=200, largest_weight=3)
    claims = [(name, MOMENTS_TOKENS) for name in "abcxyz"]
    weights = rule.weigh(claims, dict.fromkeys("abc", 10))
    assert weights[:3] == [MOMENTS_TOKENS] * 3
    assert sum(weights[3:]) <= 0.2 * sum(weights)
