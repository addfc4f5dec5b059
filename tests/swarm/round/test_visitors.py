"""What is left of peers that join and are killed: nothing that grows with their number."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from peer.outer.round import Due, Group, RoundAborted
from peer.protocol.lineage import Member
from peer.protocol.wire import JoinMessage, group_id
from peer.swarm.runtime.tasks import cancel_and_wait
from tests.swarm.gathering import until
from tests.swarm.runs import RUN, contributions, make_state
from tests.swarm.table import RECIPE, exchange_of

NUMEL, VISITS = 20_000, 200
BYTES_A_VISIT = 3000  # less than any stream, buffer or update of this size
pytestmark = pytest.mark.usefixtures("arithmetic")


class Home:
    """One member that stays, and what it does when another comes and is killed in the middle of an exchange."""

    def __init__(self, network):
        self.network, self.node, self.state = network, network.node(), make_state(NUMEL, "int8")
        self.exchange = exchange_of(self.node, 10.0, RECIPE, self.state.wire)
        self.local = contributions(self.state, 1, seed=1)[0]

    async def visit(self):
        visitor = self.network.node()
        other = exchange_of(visitor, 10.0, RECIPE, self.state.wire)
        await other.start()
        joins = [JoinMessage(run_id=RUN, round=0, parent=self.state.lineage_id, tokens=tokens) for tokens in (100, 200)]
        ids = [self.node.peer_id, visitor.peer_id]
        members = tuple(Member(peer_id=peer, tokens=join.tokens) for peer, join in zip(ids, joins, strict=True))
        ours, theirs = (Group(group_id(joins, ids), join, members, index) for index, join in enumerate(joins))
        staying = asyncio.ensure_future(self.exchange.exchange(ours, Due(1, 100, self.local), self.state))
        begun = self.node.traffic["round"].received
        leaving = asyncio.ensure_future(other.exchange(theirs, Due(1, 200, self.local), make_state(NUMEL, "int8")))
        await until(lambda: self.node.traffic["round"].received > begun)
        self._kill(visitor)
        senders = other._buffers.senders.values()  # they end with their process
        await cancel_and_wait([leaving, *visitor._tasks, *senders])
        with pytest.raises(RoundAborted):
            await asyncio.wait_for(staying, 10.0)
        await until(lambda: not self.node._tasks)

    def _kill(self, visitor):
        self.network.cut(visitor.peer_id)
        self.network.nodes.remove(visitor)
        for writer in self.network.writers:
            writer.close()
        self.network.writers.clear()


async def test_two_hundred_peers_that_are_killed_leave_nothing_behind(network):
    network.retime(finish_timeout_s=0.0)  # of an ended group; the visits come faster
    home = Home(network)
    await home.exchange.start()
    sizes = []
    try:
        for number in range(VISITS):
            await home.visit()
            if number == VISITS // 4:
                tracemalloc.start()
            if number in (VISITS // 2, VISITS - 1):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < VISITS // 2 * BYTES_A_VISIT
    assert home.node._tasks == set()
