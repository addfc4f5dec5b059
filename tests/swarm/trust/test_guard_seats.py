"""Whom a guard gives a seat although its books refuse it, and what it says of those that it does not."""

from __future__ import annotations

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.weights import WeightRule
from peer.swarm.lineage.round_loop import LineageRounds
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.trust.verdict import Verdict
from tests.swarm.circle import Circle


def establish(monkeypatch, one, other):
    """By the chain that this peer has, these two are past their probation, and all others are in no round."""
    monkeypatch.setattr(one.rosters, "_rule", WeightRule(nominal_tokens=1, probation_rounds=10))
    one.rosters._seen = lambda: {one.peer_id: 20, other.peer_id: 20}


@pytest.mark.parametrize(("count", "fewest", "refuses"), [(4, 2, True), (3, 2, True), (3, 3, False), (2, 2, False)])
async def test_who_stalls_is_refused_where_the_others_are_enough_for_a_round(network, tmp_path, count, fewest, refuses):
    """Else two peers that are there, and would make a round, wait for minutes."""
    circle = await Circle(network, count, folder=tmp_path).start()
    one, other, *_ = circle.seats
    one.guard.fewest = fewest
    one.guard.stalls.cost(other.peer_id, 10.0, again=True)
    one.guard.stalls._shunned.add(other.peer_id, 60.0)
    assert one.guard.stalls.refuses(other.peer_id)
    assert one.guard.refuses(other.peer_id) == refuses
    assert (one.guard.objection([other.peer_id]) is not None) == refuses


async def test_of_several_that_stall_the_least_guilty_get_the_seats_that_are_missing(network, tmp_path):
    """Not all of them: a staller that has an honest member refused as well would keep its own seat."""
    circle = await Circle(network, 4, folder=tmp_path).start()
    one, least, longer, worst = circle.seats
    for seconds, other in enumerate((least, longer, worst), start=10):
        one.guard.stalls.cost(other.peer_id, seconds, again=True)
    one.guard.stalls._shunned.add(least.peer_id, 60.0)
    for fewest, seated in ((1, []), (2, [longer]), (3, [longer, worst]), (4, [least, longer, worst])):
        one.guard.fewest = fewest
        assert [other for other in (least, longer, worst) if not one.guard.refuses(other.peer_id)] == seated


async def test_peers_that_no_round_has_seen_are_not_enough(network, tmp_path, monkeypatch):
    """Anybody can make them."""
    circle = await Circle(network, 3, folder=tmp_path).start()
    one, other, _ = circle.seats
    establish(monkeypatch, one, other)
    one.guard.stalls.cost(other.peer_id, 10.0, again=True)
    assert not one.guard.refuses(other.peer_id)
    one.rosters._seen = lambda: {seat.peer_id: 20 for seat in circle.seats}
    assert one.guard.refuses(other.peer_id)


async def test_no_stranger_takes_the_seat_that_a_refused_member_is_spared(network, tmp_path, monkeypatch):
    """All strangers are refused for a minute after one has cost a deadline, and none of them is guilty of more."""
    circle = await Circle(network, 3, folder=tmp_path).start()
    one, other, stranger = circle.seats
    establish(monkeypatch, one, other)
    one.guard.stalls.cost(other.peer_id, 10.0, again=True)
    one.guard.stalls.cost(circle.seats[0].peer_id + "x", 10.0)  # another stranger
    assert one.guard.stalls.refuses(stranger.peer_id)
    assert [seat.peer_id for seat in (other, stranger) if not one.guard.refuses(seat.peer_id)] == [other.peer_id]


async def test_a_crowd_of_refused_strangers_is_looked_at_once(network, tmp_path, monkeypatch):
    """Each of 512 cost a look at all of them: 0.9 s of a processor whenever a leader was looked for."""
    circle = await Circle(network, 2, folder=tmp_path).start()
    one, other = circle.seats
    establish(monkeypatch, one, other)
    crowd = [f"stranger {number}" for number in range(100)]
    one.guard.stalls.cost(crowd[0], 10.0)
    asked = []
    monkeypatch.setattr(one, "live_peers", lambda: asked.append(1) or [other.peer_id, *crowd])
    assert all(map(one.guard.refuses, crowd))
    assert len(asked) <= 1


async def test_evidence_against_a_stranger_counts_until_it_has_taken_part(network, tmp_path):
    """Its peer would decline every group with it, and could not say why to the others."""
    circle = await Circle(network, 3, folder=tmp_path).start()
    one, other, _ = circle.seats
    one.guard.bans.note(Verdict(other.peer_id, "lied"))
    objection = one.guard.objection([other.peer_id])
    assert isinstance(objection, StalledError)
    assert objection.lack == Lack("stream", frozenset({other.peer_id}))  # so that the others know whom it declines
    one.rosters._seen = lambda: {other.peer_id: 1}
    assert not one.guard.banned(other.peer_id)
    assert one.guard.objection([other.peer_id]) is None


def test_a_plain_reason_to_decline_names_its_culprit(monkeypatch):
    said = []

    class Streams:
        group_streams = property(lambda self: self)

        def decline(self, _, abort):
            said.append(abort)

    rounds = LineageRounds.__new__(LineageRounds)
    monkeypatch.setattr(rounds, "_exchange", Streams(), raising=False)
    rounds.decline(None, RoundAborted("match", "x left while the roster was sent", "x"))
    assert [(type(abort), abort.lack, abort.culprit) for abort in said] == [
        (StalledError, Lack("stream", frozenset({"x"})), "x")
    ]
