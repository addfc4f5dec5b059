from __future__ import annotations

import math

import pytest

from peer.link.contribution_slot import ContributionSlot
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Progress, Snapshot, ToTrainer, WantSnapshot
from peer.link.supervisor import create_descriptor
from peer.outer.round import Due
from peer.protocol.lineage import Position


class Peer:
    """A `ContributionSlot` whose trainer is played by the test."""

    def __init__(self, *, called: bool = True) -> None:
        self.told: list[object] = []
        self.position = Position(3, "a" * 64, 0)
        self.memory = SharedState(create_descriptor(), 2, 0)
        self.slot = ContributionSlot(self, self, called)

    def tell(self, message: ToTrainer) -> None:
        """What its trainer is told."""
        self.told.append(message)

    def moves(self) -> None:
        """The state is that of the next round."""
        self.position = Position(self.position.round + 1, "b" * 64, 0)

    def contributes(self) -> Due:
        """A contribution is ready, and its round begins."""
        self.slot.on_snapshot(Snapshot(sequence=1, tokens=10))
        due = self.slot.due
        assert due is not None
        self.slot.begin_round()
        return due

    @property
    def asked(self) -> int:
        """How often the trainer was asked for a contribution since the last look."""
        found = sum(isinstance(message, WantSnapshot) for message in self.told)
        self.told.clear()
        return found


async def test_where_peers_call_for_rounds_nobody_is_due_and_everybody_may_be_asked() -> None:
    peer = Peer()
    assert (peer.slot.due_in_s(), peer.slot.halfway()) == (math.inf, True)  # before the first report, too
    peer.slot.on_progress(Progress(
        step=1, tokens=10, tokens_per_s=0.0, loss=None, due_in_s=None, unsent_tokens=0, seconds_waiting=0.0
    ))  # fmt: skip
    assert (peer.slot.due_in_s(), peer.slot.halfway()) == (math.inf, True)
    assert not Peer(called=False).slot.halfway()


@pytest.mark.parametrize(
    ("unsent", "rate", "halfway"), [(0, 0.0, False), (1, 0.0, True), (0, 10.0, False), (50, 10.0, True)]
)
async def test_a_peer_that_has_trained_nothing_is_not_halfway(unsent: int, rate: float, halfway: bool) -> None:
    peer = Peer(called=False)
    peer.slot.on_progress(Progress(
        step=0, tokens=0, tokens_per_s=rate, loss=None, due_in_s=5.0, unsent_tokens=unsent, seconds_waiting=0.0
    ))  # fmt: skip
    assert peer.slot.halfway() is halfway


@pytest.mark.parametrize("last", ["round", "merge"])
async def test_a_call_for_the_next_round_is_answered_when_this_one_is_over(last: str) -> None:
    peer = Peer()
    slot, due = peer.slot, peer.contributes()
    peer.moves()
    assert slot.due_in_s() == math.inf  # of the next one
    slot.announce_anchor(1)
    assert [message for message in peer.told if isinstance(message, Anchor)]
    slot.request_now()
    ends = [slot.on_merged, lambda: slot.release(due)]
    for end in ends if last == "round" else ends[::-1]:
        assert peer.asked == 0
        end()
    assert peer.asked == 1
    slot.request_now()
    assert peer.asked == 0  # it is asked already
    slot.on_merged()
    assert peer.asked == 0


async def test_a_call_for_the_round_that_runs_is_not_kept() -> None:
    peer = Peer()
    due = peer.contributes()
    assert peer.slot.due_in_s() == 0.0
    peer.slot.request_now()  # as the timer of whoever waited a whole window does, however long the round takes
    peer.moves()
    peer.slot.announce_anchor(1)
    peer.slot.on_merged()
    peer.slot.release(due)
    assert peer.asked == 0


async def test_after_a_round_that_failed_nobody_is_asked_until_it_is_known_what_became_of_it() -> None:
    peer = Peer()
    peer.slot.release(peer.contributes())
    peer.slot.request_now()
    assert peer.asked == 0  # the trainer would write over the snapshot that others may have committed
    peer.slot.want_snapshot()  # the aftermath
    assert peer.asked == 1
    peer.slot.on_snapshot(Snapshot(sequence=2, tokens=20))
    due = peer.slot.due
    assert due is not None
    assert (due.sequence, due.tokens, due.snapshot) == (2, 20, peer.memory.snapshot)


@pytest.mark.parametrize("ready", [False, True])
async def test_a_call_between_catching_up_and_its_anchor_is_answered_after_that(ready: bool) -> None:
    peer = Peer()
    if ready:
        peer.slot.on_snapshot(Snapshot(sequence=1, tokens=10))  # for the round that others made meanwhile
    peer.moves()
    assert peer.slot.due_in_s() == math.inf
    peer.slot.request_now()
    peer.slot.announce_anchor(None)
    peer.slot.on_snapshot(Snapshot(sequence=2, tokens=10))  # from before the trainer saw the anchor
    assert peer.slot.due is None
    asked = peer.asked
    assert asked == (not ready)
    peer.slot.on_merged()
    assert peer.asked == 1


async def test_what_was_asked_for_at_the_anchor_before_is_not_asked_for_again() -> None:
    peer = Peer()
    peer.slot.request_now()
    peer.moves()
    peer.slot.announce_anchor(None)
    peer.slot.on_merged()
    assert peer.asked == 1  # then


async def test_where_rounds_are_due_by_themselves_a_call_before_the_end_of_one_is_dropped() -> None:
    peer = Peer(called=False)
    peer.slot.announce_anchor(None)
    peer.slot.request_now()
    peer.slot.on_merged()
    assert peer.asked == 0
    peer.slot.request_now()
    assert peer.asked == 1
