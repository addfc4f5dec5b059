"""What a contribution weighs that was trained from an old anchor."""

from __future__ import annotations

from peer.outer.policy.schedules import Strided
from peer.outer.policy.staleness import Staleness
from peer.outer.policy.straggler import Quorum, WaitAll
from peer.outer.state.fragments import whole


def test_a_contribution_weighs_less_the_more_rounds_were_made_since_the_last():
    stale = Staleness(Quorum(fraction=0.5), whole, 1, 1200)
    stale.join(2)
    assert [stale.of(rounds) for rounds in (2, 3, 5)] == [0, 1, 3]
    assert stale.weigh(1000, 5) == 500  # (1 + 3)^-1/2
    assert stale.weigh(5000, 5) == 600  # of the most that a contribution weighs
    assert stale.weigh(1, 5) == 1
    stale.count(5)
    assert stale.weigh(5000, 5) == 5000
    assert Staleness(WaitAll(), whole, 1, 1200).weigh(5000, 5) == 5000


def test_the_age_of_a_fragment_counts_its_own_rounds():
    turns = Strided(period=8, num_fragments=2).turn
    stale = Staleness(Quorum(fraction=0.5), turns, 2, 1000)
    assert [stale.of(rounds) for rounds in (0, 1, 2, 3, 4)] == [0, 0, 1, 1, 2]
    stale.count(3)  # of the fragment of rounds 1, 3, 5
    assert [stale.of(rounds) for rounds in (3, 4, 5, 6)] == [1, 0, 2, 1]


def test_a_shorter_lineage_makes_nothing_stale_and_no_weight_impossible():
    for policy in (Quorum(fraction=0.5), WaitAll()):
        stale = Staleness(policy, whole, 1, 1000)
        stale.count(12)
        assert (stale.of(10), stale.weigh(800, 10)) == (0, 800)
        stale.join(12)
        assert (stale.of(10), stale.weigh(800, 10)) == (0, 800)
