"""A group at one table: everybody's exchange over a `MemoryNetwork`, and a seat for somebody who does not play fair."""

from __future__ import annotations

import asyncio
import hashlib

from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.round import Due, Group
from peer.outer.state.fragments import Fragments
from peer.outer.state.reduced_update import SLICE
from peer.protocol.lineage import Link, Member
from peer.protocol.manifest import RecipeSpec, RoundSpec
from peer.protocol.weights import WeightRule
from peer.protocol.wire import HelloMessage, JoinMessage, Kind, group_id
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.round.exchange import Exchange
from peer.swarm.round.strategy_choice import strategies_of
from tests.swarm.runs import RUN, contributions, make_state

NAME = f"atoll/{RUN[:16]}/round"

RECIPE = swarm_recipe(RecipeSpec(name="opendiloco"))


def exchange_of(node, timeout_s, recipe, wire):
    """That of a member, which starts from genesis."""
    rosters = RosterAuthority(node.identity, RUN, RoundSpec(), WeightRule())
    return Exchange(node, rosters, timeout_s, strategies_of(recipe, Fragments.of(wire), node.identity, list))


class Table:
    """`count` members with weights 100, 200, ...; all stand at genesis."""

    def __init__(self, network, count, *, timeout_s=10.0, numel=2000, codec="int8", recipe=RECIPE, elements=SLICE):
        self.nodes = [network.node() for _ in range(count)]
        self.states = [make_state(numel, codec, elements) for _ in range(count)]
        self.exchanges = [exchange_of(node, timeout_s, recipe, self.states[0].wire) for node in self.nodes]
        self.weights = [100 * (index + 1) for index in range(count)]
        self.locals = contributions(self.states[0], count, seed=1)
        parent = self.states[0].lineage_id
        joins = [JoinMessage(run_id=RUN, round=0, parent=parent, tokens=weight) for weight in self.weights]
        ids = [node.peer_id for node in self.nodes]
        members = tuple(Member(peer_id=peer, tokens=tokens) for peer, tokens in zip(ids, self.weights, strict=True))
        identifier = group_id(joins, ids)
        self.groups = [Group(identifier, join, members, index) for index, join in enumerate(joins)]

    def contribution_bytes(self, index):
        """Bytes of the part that member `index` reduces."""
        return sum(self.states[0].wire.contributed_bytes(len(self.nodes), index))

    async def exchange(self, index, local=None):
        """One honest member's exchange."""
        due = Due(1, self.weights[index], self.locals[index] if local is None else local)
        return await self.exchanges[index].exchange(self.groups[index], due, self.states[index])

    async def all(self, indices=None, work=None):
        """The outcomes (or what was raised) of several members at once."""
        indices = range(len(self.nodes)) if indices is None else indices
        for index in indices:
            await self.exchanges[index].start()
        jobs = [(work or self.exchange)(index) for index in indices]
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30.0)

    def link(self, index, update, **changes):
        """The link that member `index` computes."""
        state = self.states[index]
        values = {
            "run_id": RUN, "round": 0, "parent": state.lineage_id, "roster": self.groups[0].members,
            "update_digest": update.digest(), "state_digest": state.digest(), **changes,
        }  # fmt: skip
        return Link(**values)

    async def absorb(self, index):
        """Let member `index` accept everything and answer nothing."""

        async def read(stream):
            limits = dict.fromkeys(Kind, 1 << 24)
            while True:
                await stream.receive(limits)

        await self.nodes[index].serve(NAME, "round", read)

    async def speak(self, index, to, *frames):
        """Member `index` sends frames of its own making to member `to`, after a proper HELLO."""
        stream = await self.nodes[index].open(self.nodes[to].peer_id, NAME, "round")
        await stream.send_message(Kind.HELLO, HelloMessage(group_id=self.groups[index].id))
        for kind, body in frames:
            await stream.send(kind, body)
        return stream


def other_digest(text):
    """A digest that nobody computed."""
    return hashlib.sha256(text.encode()).hexdigest()
