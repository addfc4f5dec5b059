from __future__ import annotations

import math

import pytest
import torch

from peer.link.messages import Anchor, Progress, Snapshot, WantSnapshot
from peer.swarm.handover import Handover
from peer.swarm.keeper import Position


class Peer:
    """A `Handover` whose trainer is played by the test."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.handover = Handover(lambda: torch.zeros(2), lambda: Position(3, "a" * 64, 0), self.told.append)

    async def reports(self, due_in_s: float | None, unsent: int = 10, tokens_per_s: float = 10.0) -> Handover:
        self.handover.on_progress(Progress(
            step=1, tokens=10, tokens_per_s=tokens_per_s, loss=None, due_in_s=due_in_s, unsent_tokens=unsent,
            seconds_waiting=0.0,
        ))  # fmt: skip
        return self.handover

    @property
    def asked(self) -> int:
        """How often the trainer was asked for a contribution since the last look."""
        found = sum(isinstance(message, WantSnapshot) for message in self.told)
        self.told.clear()
        return found


async def test_where_peers_call_for_rounds_nobody_is_due_and_everybody_may_be_asked() -> None:
    handover = await Peer().reports(None, unsent=0, tokens_per_s=0.0)
    assert handover.due_in_s() == math.inf
    assert handover.halfway()
    assert handover.called
    assert not Handover(lambda: torch.zeros(2), lambda: Position(0, "", 0), lambda _: None).halfway()


@pytest.mark.parametrize("ends", ["round", "merge"])
async def test_a_call_before_the_end_of_a_round_is_answered_after_it(ends: str) -> None:
    peer = Peer()
    handover = await peer.reports(None)
    handover.on_snapshot(Snapshot(sequence=1, tokens=10))
    due = handover.due
    assert due is not None
    handover.in_round = True
    handover.announce_anchor(1)
    assert [message for message in peer.told if isinstance(message, Anchor)]
    handover.hurry()
    if ends == "round":  # the trainer has merged before
        handover.on_merged()
        assert peer.asked == 0
        handover.in_round = False
        handover.spent(due)
    else:
        handover.in_round = False
        handover.spent(due)
        assert peer.asked == 0
        handover.on_merged()
    assert peer.asked == 1
    handover.hurry()
    assert peer.asked == 0  # it is asked already
    handover.on_merged()
    assert peer.asked == 0


async def test_where_rounds_are_due_by_themselves_such_a_call_is_dropped() -> None:
    peer = Peer()
    handover = await peer.reports(5.0)
    assert not handover.called
    handover.announce_anchor(None)
    handover.hurry()
    handover.on_merged()
    assert peer.asked == 0
    handover.hurry()
    assert peer.asked == 1
