"""An invitation, and whether who says that it comes does."""

from __future__ import annotations

import asyncio

from peer.protocol.wire import InviteMessage, Kind, StatusMessage
from peer.swarm.group.regrouping import RegroupPolicy
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.gathering import PARENT, gather
from tests.swarm.runs import RUN


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


async def test_a_peer_ends_its_persistent_group_exactly_if_it_says_that_it_comes(network):
    first, second, third = await gather(network, 3)
    clock = Clock()
    members = frozenset({first.peer_id, second.peer_id})
    matchmaker = second.matchmaker
    second.itself.members = members
    matchmaker._regrouping = RegroupPolicy(STANDARD, clock, 240.0)
    answers = []
    for wait_s in (0.0, 0.0, STANDARD.first_regroup_wait_s):
        clock.now += wait_s
        stream = await third.node.open(second.peer_id, f"atoll/{RUN[:16]}/invite", "round")
        await stream.send_message(
            Kind.INVITE, InviteMessage(run_id=RUN, round=5, parent=PARENT, weight=100, wait_s=1.0)
        )
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        wanted = bool(matchmaker.newcomers(members))
        answers.append((status.coming, wanted))
        matchmaker._regrouping.missed([third.peer_id])
        stream.close()
    assert answers == [(True, True), (True, True), (False, False)]
    assert STANDARD.longest_regroup_wait_s > STANDARD.first_regroup_wait_s


async def test_where_peers_call_for_rounds_whoever_invites_is_answered_and_else_the_leader_alone(network):
    peers = await gather(network, 3)
    leader = next(one for one in peers if one.peer_id == one.matchmaker.membership.leader())
    asked, caller = (one for one in peers if one is not leader)

    async def hurries(called):
        asked.itself.called, asked.due_in_s = called, float("inf")
        asked.hurried.clear()
        stream = await caller.node.open(asked.peer_id, f"atoll/{RUN[:16]}/invite", "round")
        invite = InviteMessage(run_id=RUN, round=5, parent=PARENT, weight=100, wait_s=1.0)
        await stream.send_message(Kind.INVITE, invite)
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        stream.close()
        return status.coming, asked.hurried.is_set()

    assert await hurries(False) == (True, False)  # it will come of itself, and to another
    assert await hurries(True) == (True, True)


async def test_a_peer_that_avoids_a_leader_does_not_say_that_it_comes(network):
    """It leads its own group meanwhile, and the leader would wait a whole window for it."""
    leader, invited = await gather(network, 2)

    async def comes():
        stream = await leader.node.open(invited.peer_id, f"atoll/{RUN[:16]}/invite", "round")
        invite = InviteMessage(run_id=RUN, round=5, parent=PARENT, weight=100, wait_s=1.0)
        await stream.send_message(Kind.INVITE, invite)
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        stream.close()
        return status.coming

    membership, answers = invited.matchmaker.membership, []
    for _ in range(2):  # an invitation shows that the leader is back, but not twice in a row
        membership.avoid(leader.peer_id)
        answers.append((await comes(), leader.peer_id in membership.expected()))
    assert answers == [(True, True), (False, False)]
