"""A group that stays: members that run round after round on the same streams, each at its own position."""

from __future__ import annotations

import asyncio
import random

from peer.outer.compress.registry import compressor
from peer.outer.optim.optimizers import Nesterov
from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.round import Due, link_of
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import SLICE, ReduceFormat
from peer.protocol.lineage import Position
from peer.protocol.manifest import RecipeSpec, RoundSpec
from peer.protocol.weights import WeightRule
from peer.swarm.group.allotter import Allotter
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.round.exchange import Exchange
from peer.swarm.round.strategy_choice import strategies_of
from peer.swarm.trust.guard import Guard
from peer.swarm.trust.judge import Judge
from peer.swarm.trust.recompute import Recomputer
from tests.swarm.runs import RUN, contributions, make_state

RECIPE = swarm_recipe(RecipeSpec(name="opendiloco"))
ROUNDS = RoundSpec(min_group=2, max_group=16)
NOMINAL = 10_000
PATIENCE_S = 5.0


class Never(random.Random):
    """Draws no round for an audit."""

    def random(self):
        return 1.0


class Seat:
    """One member; its weight is 100 (index + 1) tokens."""

    def __init__(self, node, index, numel, written, recipe, folder=None):
        self.node, self.tokens = node, 100 * (index + 1)
        plain = make_state(numel)
        self.state = OuterState(plain.anchor, plain.buffers, Nesterov(lr=0.7, momentum=0.6), written)
        self.state.lineage_id = plain.lineage_id
        fragments = self.state.fragments
        self.rosters = RosterAuthority(
            node.identity, RUN, ROUNDS, WeightRule(nominal_tokens=NOMINAL),
            allotter=Allotter(recipe, fragments, node.peer_id, tokens_per_s=lambda: self.tokens / 2.0),
        )  # fmt: skip
        self.calls, self.live = 0, ()
        self.chain = []
        self.recomputer = Recomputer(fragments, recipe, lambda: self.chain)
        judge = Judge(RUN, self.recomputer)
        # random audits are left out: a test says what is audited, and when
        self.guard = Guard(node, judge, folder / str(index), self, self.rosters, rng=Never()) if folder else None
        strategies = strategies_of(recipe, fragments, node.identity, lambda: self.chain)
        self.exchange = Exchange(node, self.rosters, 20.0, strategies, self.called, self.guard)
        self.weight = 0
        self.streams = 0
        opening = node.open

        async def counted(*arguments, **options):
            self.streams += 1
            return await opening(*arguments, **options)

        node.open = counted

    def on_ban(self, culprit, reason):
        """A peer is banned."""

    def live_peers(self):
        """Whom the directory shows."""
        return self.live

    def called(self):
        self.calls += 1

    @property
    def peer_id(self):
        return self.node.peer_id

    @property
    def position(self):
        return Position(self.state.round, self.state.lineage_id, self.weight)


class Circle:
    """`count` members at genesis."""

    def __init__(
        self, network, count, *, numel=2000, codec="int8", recipe=RECIPE, elements=None, folder=None, written=None
    ):
        """`folder`: where the guards of all seats keep bans; None for exchanges without guards. `written`: how updates
        are, in place of slices of `codec`.
        """
        written = written or ReduceFormat(numel, compressor(codec), elements or SLICE)
        self.seats = [Seat(network.node(), index, numel, written, recipe, folder) for index in range(count)]
        for seat in self.seats:
            seat.live = tuple(other.peer_id for other in self.seats if other is not seat)
        self._joins = None

    async def start(self):
        for seat in self.seats:
            await seat.exchange.start()
            if seat.guard is not None:
                await seat.guard.start()
        return self

    def locals(self):
        """What each member has trained by now."""
        return contributions(self.seats[0].state, len(self.seats), self.seats[0].state.round)

    def _first(self, seat):
        if self._joins is None:
            joins = {other.peer_id: other.rosters.join(other.position, other.tokens) for other in self.seats}
            self._joins = {peer_id: (sealed, join) for peer_id, (join, sealed) in joins.items()}
        return seat.rosters.write(self._joins)[1]

    async def next_round(self, index, patience_s=PATIENCE_S, *newcomer):
        """One member's wish for the next round of the persistent group."""
        seat = self.seats[index]
        due = Due(1, seat.tokens, self.locals()[index])
        return await seat.exchange.next_round(due, seat.state, seat.position, patience_s, *newcomer)

    async def one_round(self, index, local, first):
        """One member's round up to what it has applied."""
        seat = self.seats[index]
        due = Due(1, seat.tokens, local)
        if first is not None:
            group = first
        else:
            group = await seat.exchange.next_round(due, seat.state, seat.position, PATIENCE_S)
        exchanged = await seat.exchange.exchange(group, due, seat.state)
        update = exchanged.update
        link = await link_of(group, exchanged, seat.state, seat.state.digest())
        certificate = await seat.exchange.commit(group, link)
        seat.chain.append(certificate)
        seat.state.apply(update, seat.state.round + 1, certificate.link.id)
        await seat.exchange.release(group, None, seat.position)
        return group, update

    async def round(self):
        """A round of everybody; -> (group, update) of each."""
        locals_ = self.locals()
        matched = self.seats[0].state.round == 0
        firsts = [self._first(seat) if matched else None for seat in self.seats]
        jobs = [self.one_round(index, local, firsts[index]) for index, local in enumerate(locals_)]
        return locals_, await asyncio.wait_for(asyncio.gather(*jobs), 30.0)
