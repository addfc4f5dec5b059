from __future__ import annotations

import math
import os

import pytest
import torch

from peer.link.messages import Anchor, Fatal, LivePeers, Mapped, Merged, Progress, Published, Snapshot, WantSnapshot
from peer.link.supervisor import create_descriptor
from peer.link.tally import PROGRESS_PERIOD_S
from tests.link.fakes import LINEAGE, MAPPED, NUMEL, PUSH, START, STEPS, Peer, Step

AGAIN = START.model_copy(update={"restarted": True})


@pytest.fixture
def make():
    descriptors = []

    def build(**limits):
        descriptors.append(create_descriptor())
        return Peer(descriptors[-1], **limits)

    yield build
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def peer(make):
    return make().begin()


def test_the_first_anchor_becomes_the_model(peer):
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL).float())
    assert peer.agent.take(Merged) == [Merged(round=0)]
    assert peer.sync.global_step == 0.0


def test_a_snapshot_is_handed_over_when_due_and_only_once(peer):
    peer.steps(STEPS - 1)
    assert peer.agent.take(Snapshot) == []
    peer.steps(1)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=40)]
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL) + 2.0)
    peer.steps(3 * STEPS)
    assert peer.agent.take(Snapshot) == []
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL) + 2.0)


def test_merging_without_steps_meanwhile_gives_the_anchor_bit_for_bit(peer):
    torch.manual_seed(1)
    peer.replica.flat.copy_(torch.randn(NUMEL) * 1e-3)
    peer.steps(STEPS)
    peer.commit(torch.randn(NUMEL) * 1e6, contributed=1)
    peer.sync.poll()
    assert peer.replica.flat.numpy().tobytes() == peer.memory.anchor.numpy().tobytes()
    assert peer.agent.take(Merged)[-1] == Merged(round=1)
    assert torch.equal(peer.sync.anchor, peer.memory.anchor)


def test_steps_made_during_a_round_are_kept(peer):
    peer.steps(STEPS + 3)
    peer.commit(shift=-8.0, contributed=1)
    peer.steps(1)
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) - 8.0 + 4 * PUSH)
    assert (peer.sync.round, peer.sync.rounds_contributed, peer.sync.steps_since_snapshot) == (1, 1, 4)
    # four steps are due again: handed over with the tokens that the anchor does not hold
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=40), Snapshot(sequence=2, tokens=40)]


def test_a_missed_round_keeps_all_progress(peer):
    peer.steps(STEPS)
    peer.commit(shift=16.0, contributed=None)
    peer.steps(1)
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 16.0 + 5 * PUSH)
    assert (peer.sync.round, peer.sync.rounds_contributed) == (1, 0)
    assert peer.agent.take(Snapshot)[-1] == Snapshot(sequence=2, tokens=50)
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL) + 16.0 + 5 * PUSH)


def test_an_older_contribution_is_not_taken_for_the_outstanding_one(peer):
    peer.steps(STEPS)
    peer.commit(shift=1.0, contributed=7)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 1.0 + STEPS * PUSH)
    assert peer.sync.rounds_contributed == 0


def test_the_agent_gets_a_fresh_snapshot_when_it_asks(peer):
    peer.steps(STEPS)
    peer.agent.inbox.append(WantSnapshot(after=1))
    peer.steps(2)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=40), Snapshot(sequence=2, tokens=50)]
    peer.commit(shift=5 * PUSH, contributed=2)  # as if everybody had made the same five steps
    peer.steps(1)
    assert peer.sync.steps_since_snapshot == 2
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 7 * PUSH)


def test_a_wish_is_ignored_while_a_newer_snapshot_is_on_its_way(peer):
    peer.steps(STEPS)
    peer.agent.inbox.append(WantSnapshot(after=0))
    peer.steps(1)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=40)]
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL) + STEPS * PUSH)


def test_a_wish_before_the_round_is_due_is_granted_with_what_there_is(peer):
    peer.agent.inbox.append(WantSnapshot(after=0))
    peer.steps(1)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=10)]


def test_a_contribution_weighs_at_least_one_token(peer):
    peer.agent.inbox.append(WantSnapshot(after=0))
    peer.sync.poll()
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=1)]


def test_training_goes_on_without_an_agent_and_the_next_one_is_told_everything(peer):
    peer.steps(STEPS)
    peer.agent.die()
    peer.agent.may_restart = False
    peer.steps(3)
    assert (peer.agent.starts, peer.sync.step) == (1, 7)
    peer.agent.may_restart = True
    peer.agent.sent.clear()
    peer.steps(1)
    assert peer.agent.starts == 2
    assert peer.agent.sent == [AGAIN]
    peer.agent.inbox.append(Published(manifest={}, organiser="o", peer_id="p", nickname="n", maddrs=()))
    peer.steps(STEPS)
    assert peer.agent.take(Mapped) == [MAPPED]
    assert peer.agent.take(Snapshot) == []  # nothing is handed over before the new agent's first anchor
    peer.commit(shift=4.0, contributed=None)
    peer.steps(1)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=2, tokens=130)]
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 4.0 + 13 * PUSH)


def test_a_snapshot_that_the_dead_agent_had_committed_is_recognised(peer):
    peer.steps(STEPS)
    peer.agent.die()
    peer.steps(2)
    peer.commit(shift=-8.0, contributed=1)
    peer.steps(1)
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) - 8.0 + 3 * PUSH)
    assert (peer.sync.rounds_contributed, peer.sync.steps_since_snapshot) == (1, 3)


def test_an_agent_that_dies_right_after_its_start_does_not_stop_training(peer):
    peer.agent.die()
    peer.agent.dies_at_once = True
    peer.steps(3)
    assert (peer.agent.starts, peer.sync.step) == (4, 3)


def test_an_agent_that_hangs_is_ended_before_the_next_starts(peer):
    peer.agent.dead = True
    peer.steps(1)
    assert peer.agent.ended == [0.0]
    assert (peer.agent.starts, peer.agent.sent[-1]) == (2, AGAIN)


def test_a_peer_is_finished_at_the_last_round_of_the_run(make):
    peer = make(total=2).begin()
    for round in (1, 2):
        assert not peer.sync.finished
        peer.commit(shift=0.0, contributed=None, round=round)
        peer.sync.poll()
    assert peer.sync.finished


def test_a_peer_is_finished_with_the_swarms_last_token_however_many_rounds_that_took(make):
    peer = make(tokens=1000).begin()
    for round, tokens in ((3, 999), (4, 1000)):
        assert not peer.sync.finished
        peer.commit(shift=0.0, contributed=None, round=round, swarm_tokens=tokens)
        peer.sync.poll()
    assert peer.sync.goal == "the run is complete"
    late = make(tokens=1000)
    late.sync.begin(Anchor(round=9, lineage_id=LINEAGE, contributed=None, swarm_tokens=1000))
    assert late.sync.finished, "a joiner knows it at once"


def test_a_peer_is_finished_after_its_own_rounds_which_only_count_when_it_contributed(make):
    peer = make(own=1).begin(round=5)
    peer.commit(shift=0.0, contributed=None, round=6)
    peer.steps(STEPS)
    assert not peer.sync.finished
    peer.commit(shift=0.0, contributed=1, round=7)
    peer.sync.poll()
    assert peer.sync.finished
    assert not make().begin(round=10**6).sync.finished


def test_progress_is_reported_about_twice_a_second(peer):
    for _ in range(8):
        peer.now += PROGRESS_PERIOD_S / 2
        peer.steps(1)
    reports = peer.agent.take(Progress)
    assert [report.step for report in reports] == [1, 3, 5, 7]
    assert [report.tokens for report in reports] == [10, 30, 50, 70]
    assert [report.tokens_per_s for report in reports] == [40.0] * 4
    assert [report.due_in_s for report in reports] == [0.75, 0.25, 0.0, 0.0]
    assert [report.unsent_tokens for report in reports] == [10, 30, 50, 70]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0, 1e6])
def test_a_loss_that_is_no_loss_is_not_reported(peer, loss):
    peer.sync.after_step(Step(loss=loss))
    assert peer.agent.take(Progress)[0].loss is None


def test_unsent_tokens_are_those_that_no_anchor_holds(peer):
    peer.steps(STEPS + 1)
    peer.commit(shift=0.0, contributed=1)
    peer.sync.poll()
    assert peer.sync.progress() == {
        "round": 1, "step": 5, "tokens": 50, "steps_since_snapshot": 1, "unsent_tokens": [10], "pending_data": []
    }  # fmt: skip


def test_a_resumed_peer_keeps_its_progress_under_the_new_anchor(make):
    peer = make()
    peer.replica.flat.copy_(torch.arange(NUMEL) + 3.0)  # the checkpoint's parameters: 3 ahead of its anchor
    saved = {"round": 5, "step": 22, "tokens": 220, "steps_since_snapshot": 2, "unsent_tokens": [20],
             "pending_data": [[0, 3, 5]]}
    peer.sync.resume(saved)
    assert peer.sync.progress() == saved
    peer.memory.anchor += 16.0
    peer.begin(round=9)
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 16.0 + 3.0)
    assert (peer.sync.round, peer.sync.global_step) == (9, 9 * STEPS + 2.0)
    peer.steps(2)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=40)]


def test_a_resumed_peer_drops_progress_that_its_earlier_life_has_contributed(make):
    peer = make()
    peer.replica.flat.copy_(torch.arange(NUMEL) + 3.0)
    peer.sync.resume({"round": 5, "step": 22, "tokens": 220, "steps_since_snapshot": 2, "unsent_tokens": [20],
                      "pending_data": [[0, 3, 5]]})  # fmt: skip
    peer.memory.anchor += 16.0
    peer.sync.begin(Anchor(round=9, lineage_id=LINEAGE, contributed=None, earlier=True))
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 16.0)
    kept = peer.sync.progress()
    assert (kept["step"], kept["unsent_tokens"], kept["pending_data"]) == (22, [0], [])
    peer.steps(2)
    assert peer.agent.take(Snapshot) == [Snapshot(sequence=1, tokens=20)]  # due when it was, with what is new


def test_other_messages_reach_the_trainer_and_fatal_ones_do_not_end_training(peer, caplog):
    swarm = LivePeers(peers={})
    peer.agent.inbox += [swarm, Fatal(what="no bootstrap", hint="start it")]
    peer.commit(shift=0.0, contributed=None)
    peer.steps(1)
    assert peer.heard == [swarm, Anchor(round=1, lineage_id=LINEAGE, contributed=None)]
    assert "no bootstrap start it" in caplog.text


SPOILT = Step(tokens=0, loss=math.nan, grad_norm=math.nan)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_parameters_that_are_not_finite_are_dropped_for_the_anchor_and_said_once(peer, value, caplog):
    peer.steps(2)
    for _ in range(3):
        peer.replica.flat[3] = value
        peer.sync.after_step(SPOILT)
        assert torch.equal(peer.replica.flat, torch.arange(NUMEL).float())
        assert peer.sync.steps_since_fresh == 0, "they warm up again"
    assert peer.fresh == [3, 4, 5]
    assert [record.levelname[:4] for record in caplog.records] == ["WARN", "WARN"]
    assert "dropping up to 20 tokens of local progress" in caplog.messages[0]
    (snapshot,) = peer.agent.take(Snapshot)
    assert snapshot.tokens == 1, "what was trained before is lost; the round is due when it was"
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL).float())


def test_what_is_on_its_way_is_not_lost_with_what_came_after_it(peer):
    peer.steps(STEPS + 1)
    sent = peer.memory.snapshot.clone()
    peer.replica.flat[0] = math.nan
    peer.sync.after_step(SPOILT)
    assert torch.equal(peer.replica.flat, sent)
    assert peer.sync.progress()["unsent_tokens"] == [10 * STEPS]
    peer.commit(3.0, contributed=1)
    peer.sync.poll()
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL) + 3.0)
    assert peer.sync.progress()["unsent_tokens"] == [0]
    assert peer.sync.rounds_contributed == 1


@pytest.mark.parametrize("asked", [False, True])
def test_a_snapshot_that_is_not_finite_is_never_handed_over(peer, asked):
    peer.steps(STEPS if asked else STEPS - 1)
    peer.agent.take(Snapshot)
    peer.replica.flat[0] = math.inf  # after a step that was finite
    if asked:
        peer.agent.inbox.append(WantSnapshot(after=1))
    peer.steps(1)
    (snapshot,) = peer.agent.take(Snapshot)
    assert torch.equal(peer.memory.snapshot, torch.arange(NUMEL).float())
    assert snapshot.tokens == 1
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL).float())


def test_one_step_that_is_skipped_loses_nothing_and_ten_in_a_row_all(peer):
    peer.steps(1)
    before = peer.replica.flat.clone()
    for _ in range(9):
        peer.sync.after_step(SPOILT)
        peer.agent.take(Snapshot)
        peer.sync._ledger.close()
    assert torch.equal(peer.replica.flat, before)
    assert peer.fresh == []
    peer.sync.after_step(SPOILT)
    assert peer.fresh == [11]
    assert torch.equal(peer.replica.flat, torch.arange(NUMEL).float())
