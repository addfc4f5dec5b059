"""What a failed round has cost, as its members say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from peer.outer.round import RoundAborted
from peer.swarm.round.arrivals import Arrivals
from peer.swarm.round.giving_up import Lack
from peer.swarm.round.own_words import OwnWords
from peer.swarm.runtime.timing import STANDARD

LACK = Lack("join", frozenset({"other"}))


@pytest.mark.parametrize(("began", "slept_s", "cost_s"), [
    (100.0, 0.0, 4.0), (100.0, 3600.0, 6.0), (0.0, 0.0, 9.0), (0.0, 3600.0, 35.0),
], ids=["exchange", "slept amid it", "joins", "slept amid them"])  # fmt: skip
def test_no_member_pays_for_the_sleep_of_the_one_that_charges_it(began, slept_s, cost_s):
    """The others leave at the deadline; a night with a closed lid would cost a member an hour for each quarrel."""
    costs, clock = [], lambda: 104.0 + slept_s
    node = SimpleNamespace(peer_id="me", timing=STANDARD, clock=clock)
    observer = SimpleNamespace(gave_up=lambda _group, _member, _lack, lost_s: costs.append(lost_s))
    words = SimpleNamespace(provable=lambda _, lack: lack)
    times = Arrivals()
    times.opened, times.began = 95.0, began
    buffers = SimpleNamespace(times=times, deadline=105.0 if began else float("inf"))
    persistent = SimpleNamespace(position=None, identifier="group", buffers=buffers)
    own = OwnWords(node, observer, None, words, None, patience_s=34.0)
    own.gives_up(persistent, RoundAborted("match", "it is gone", "other"), LACK)
    assert costs == [cost_s]
