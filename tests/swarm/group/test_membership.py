"""Who is expected, and taken for the leader: what a peer saw itself against what the directory shows."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.wire import RejectMessage
from peer.swarm.group.membership import MAX_ANNOUNCED
from peer.swarm.runtime.expiring import ExpiringMap
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.gathering import NEXT, PARENT, gather, together, until
from tests.swarm.virtual_time import now

pytestmark = pytest.mark.usefixtures("brisk")


def set_clock(view, clock):
    for part in vars(view).values():
        if isinstance(part, ExpiringMap):
            part._clock = clock


async def test_a_leader_of_the_last_group_is_followed_though_the_directory_is_empty(network):
    first, second, third = await gather(network, 3)
    view = third.matchmaker.membership
    view.company, third.directory.peers = (first.peer_id,), {}
    assert not view.hears_of(second.peer_id, PARENT)  # never met
    assert view.hears_of(first.peer_id, NEXT)  # known, but it leads elsewhere
    assert view.leader() == third.peer_id
    assert view.hears_of(first.peer_id, PARENT)
    assert view.leader() == first.peer_id
    groups = await together(third.match(), second.match(), first.match())
    assert {len(group.members) for group in groups} == {3}
    view.avoid(first.peer_id)
    assert view.hears_of(first.peer_id, PARENT)
    assert view.leader() == third.peer_id  # whoever names it has not found out yet that it is gone


async def test_whoever_announces_itself_or_invites_is_there_again_unless_it_is_disbelieved(network):
    one, other = await gather(network, 2)
    view = one.matchmaker.membership
    view.avoid(other.peer_id)
    view.expect(other.peer_id)
    assert view.expected() == []
    view.announced(other.peer_id)
    assert view.expected() == [other.peer_id]
    view.avoid(other.peer_id)
    view.announced(other.peer_id)
    assert view.expected() == []  # twice at once is not believed: it may be silent whenever it is waited for
    later = now() + STANDARD.seen_period_s - 1.0
    set_clock(view, lambda: later)
    view.avoid(other.peer_id)
    view.announced(other.peer_id)
    assert view.expected() == []
    set_clock(view, lambda: later + 2.0)
    inviting = asyncio.ensure_future(other.matchmaker._invites.send(one.peer_id, 1.0))
    await until(lambda: view.expected() == [other.peer_id])
    await cancel_and_wait([inviting])
    view.disbelieve(other.peer_id, 30.0)
    view.announced(other.peer_id)
    assert view.expected() == []


async def test_whoever_announces_itself_goes_on_being_expected_though_all_places_for_strangers_are_taken(network):
    one, *_ = await gather(network, 2)
    view, later = one.matchmaker.membership, now()
    set_clock(view, lambda: later)
    view.company = ("companion",)
    for number in range(MAX_ANNOUNCED):
        view.expect(f"stranger {number}")
    view.expect("one more")
    view.expect("companion")
    assert "one more" not in view.expected()
    assert "companion" in view.expected()
    later += STANDARD.announced_for_s - 0.1
    view.expect("stranger 7")
    later += 0.2
    assert {"stranger 7"} == {peer for peer in view.expected() if peer.startswith("stranger")}


async def test_one_silent_peer_is_not_there_but_of_several_each_may_be(network):
    """Of three, two were left: one refused the other for minutes, since the third was still in the directory. But where
    all of four are silent, this machine is cut off: a staller that it refuses, and so does not ask, was left alone.
    """
    one, other, third, staller = await gather(network, 4)
    view, all_three = one.matchmaker.membership, {other.peer_id, third.peer_id, staller.peer_id}
    assert {*view.there()} == all_three
    view.avoid(third.peer_id)
    assert {*view.there()} == all_three - {third.peer_id}
    view.avoid(other.peer_id)
    assert {*view.there()} == all_three
    view.seen(other.peer_id)
    assert {*view.there()} == all_three - {third.peer_id}
    later = now() + STANDARD.gone_for_s + 1.0
    set_clock(view, lambda: later)
    assert {*view.there()} == all_three


@pytest.mark.parametrize("reason", ["excluded", "follow"])
async def test_a_leader_that_answers_that_it_makes_no_rounds_is_avoided_and_is_there(network, reason):
    leader, other, follower = await gather(network, 3)
    view = follower.matchmaker.membership
    reject = RejectMessage(reason=reason, round=5, lineage_id=PARENT, weight=100, leader=other.peer_id)
    await follower.matchmaker._follower._heed(reject, leader.peer_id, now())
    assert view.passes_over(leader.peer_id)
    assert {*view.there()} == {leader.peer_id, other.peer_id}


async def test_a_leader_that_redirects_for_too_long_is_avoided_and_is_there(network):
    leader, other, member = await gather(network, 3)
    view, follower = member.matchmaker.membership, member.matchmaker._follower
    follower._wasted[leader.peer_id] = STANDARD.sent_away_s + 1.0, 0
    await follower._ask_again(leader.peer_id)
    assert view.passes_over(leader.peer_id)
    assert {*view.there()} == {leader.peer_id, other.peer_id}


async def test_to_find_the_leader_among_many_the_directory_is_read_a_fixed_number_of_times(network):
    """It is sorted out anew each time: 4096 records, as often as there are peers, would take seconds."""

    class Counted:
        def __init__(self, peers):
            self.sorted_out, self.times = peers, 0

        @property
        def peers(self):
            self.times += 1
            return self.sorted_out

    times = []
    for count in (2, 9):
        one, *_ = await gather(network, count)
        counted = Counted(one.directory.peers)
        one.matchmaker.membership._directory = counted
        one.matchmaker.membership.leader()
        times.append(counted.times)
    assert times[0] == times[1]


async def test_a_peer_that_no_leader_gives_a_seat_says_so(network):
    """Not that it is alone: a person sees the others, and would look for a fault of the network."""
    first, second, refused = await gather(network, 3, wait=0.2)
    for member in (first, second):
        member.refused = frozenset({refused.peer_id})
    groups = asyncio.gather(first.match(), second.match())
    with pytest.raises(RoundAborted, match="1 of at least 2 peers; 2 gave this one no seat") as caught:
        await asyncio.wait_for(refused.match(), 10.0)
    assert caught.value.alone
    assert {len(group.members) for group in await groups} == {2}
