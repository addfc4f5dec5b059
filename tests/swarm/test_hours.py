"""Honest machines with honest faults do not keep each other from making rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.swarm.trust.debts import Debts
from peer.swarm.trust.guard import Guard
from tests.swarm.hours import PROGRAMMES, play

QUICK = ("pair", "one-line", "kills", "too-many")  # the others are among the long tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in PROGRAMMES]
)
def test_rounds_go_on_and_all_are_in_them(name):
    programme = PROGRAMMES[name]
    quiet = programme.away_every_s == programme.halves_every_s == 0.0
    outcome = play(programme, seed=17, hours=0.4 if name in QUICK else 1.0)
    assert outcome.pause_s <= programme.patience_s
    assert outcome.healed_s is not None
    assert outcome.healed_s <= 2 * programme.patience_s
    assert min(outcome.shares) >= 0.5
    assert outcome.refused_s <= (0 if quiet else 4000)
    assert outcome.faults >= (0 if quiet else 5)


def test_a_rule_that_leaves_a_pair_alone_is_seen(monkeypatch):
    monkeypatch.setattr(Guard, "_spared", lambda _: set())
    monkeypatch.setattr(Debts, "charge", lambda *_, **__: 600.0)  # already at the first failure
    outcome = play(replace(PROGRAMMES["pair"], away_every_s=100.0), seed=17, hours=0.4)
    assert outcome.pause_s > 500.0
