"""A quarter of a group's seats is for peers that no committed round has seen."""

from __future__ import annotations

import pytest

from peer.protocol.identity import Identity
from peer.protocol.manifest import RoundSpec
from peer.protocol.weights import WeightRule
from peer.swarm.group.roster import RosterAuthority


def roster(seen, *, probation=10, min_group=2, max_group=8):
    rounds, rule = RoundSpec(min_group=min_group, max_group=max_group), WeightRule(probation_rounds=probation)
    return RosterAuthority(Identity.generate(), "0" * 64, rounds, rule, lambda: seen)


@pytest.mark.parametrize(
    ("known", "fresh", "admitted"), [(1, 5, 1), (2, 5, 1), (3, 5, 1), (5, 5, 1), (6, 5, 2), (20, 5, 2), (3, 0, 0)]
)
def test_a_quarter_of_the_seats_is_for_peers_without_a_round(known, fresh, admitted):
    old, new = [f"old{number}" for number in range(known - 1)], [f"new{number}" for number in range(fresh)]
    authority = roster(dict.fromkeys(old, 3))
    authority._seen()[authority._identity.peer_id] = 3
    surplus = authority.surplus([*new, *old], "0" * 64)
    assert surplus < set(new) or not fresh
    assert len(new) - len(surplus) == admitted
    drawn = {frozenset(authority.surplus([*new, *old], f"{number:064x}")) for number in range(50)}
    assert len(drawn) > 1 or fresh == 0  # by lot: no crowd is always first


def test_at_the_beginning_and_in_private_runs_all_are_alike():
    for authority in (roster({}), roster({"old": 30}, probation=0)):
        assert authority.surplus([f"new{number}" for number in range(7)], "0" * 64) == set()
        assert not authority.fresh("new1")
        assert not authority.newcomer("new1")
    assert roster({"old": 30}).newcomer("new1")
    assert roster({"old": 30, "young": 9}).newcomer("young")
    assert not roster({"old": 9, "young": 2}).newcomer("young")  # no peer has passed probation


def test_as_many_fresh_peers_as_make_a_group_get_a_seat():
    authority = roster({"old": 3}, min_group=4)  # this peer is one of them
    assert len(authority.surplus(["old", "new1", "new2", "new3"], "0" * 64)) == 1
