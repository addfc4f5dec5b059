"""Whom a gossip round is with, and which round is next."""

from __future__ import annotations

import pytest

from peer.outer.topology.topologies import Groups, RandomPairs
from peer.protocol.identity import Identity
from peer.swarm.gossip.group_draw import GroupDraw, number_of, round_after
from tests.swarm.runs import RUN

PEERS = sorted((Identity.generate().peer_id for _ in range(9)), key=lambda peer_id: number_of(RUN, peer_id))


@pytest.mark.parametrize("topology", [RandomPairs(), RandomPairs(odd="triple"), Groups(size=3)])
@pytest.mark.parametrize("round", [1, 2, 7])
def test_members_who_see_the_same_peers_draw_the_same_groups(topology, round):
    drawn = {
        peer: GroupDraw(topology, 3, RUN, peer).group(round, [other for other in PEERS if other != peer])
        for peer in PEERS
    }
    for peer, group in drawn.items():
        assert peer in group
        assert all(drawn[other] == group for other in group)
        assert list(group) == sorted(group, key=PEERS.index)  # the order in which all add up
    assert sum(1 / len(group) for group in drawn.values()) == pytest.approx(len(set(drawn.values())))


def test_who_comes_changes_nobodys_number():
    assert number_of(RUN, PEERS[0]) == number_of(RUN, PEERS[0]) != number_of("2" * 64, PEERS[0])


@pytest.mark.parametrize(
    ("own", "others", "following"),
    [
        (0, [], 1),
        (4, [4, 4, 4], 5),
        (4, [5, 5, 4], 5),  # some have just made the round that is next: others still make it
        (4, [9, 9, 3], 9),
        (4, [90, 90, 3], 9),  # far behind, it comes nearer; and many that lie carry nobody far
        (4, [10, 10, 10], 9),
        (8, [10, 10, 10], 9),  # nobody skips a round to end the run, of 10 here
        (9, [10, 10, 10], 10),
        (4, [2, 3, 3], 5),
        (4, [4, 5, 10**9], 5),  # one that claims much carries nobody away
    ],
)
def test_the_next_round_is_the_one_that_others_make(own, others, following):
    assert round_after(own, others, last=10) == following
