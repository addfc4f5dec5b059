"""An Atoll peer of `benchmarks.exchange`: the production exchange over real libp2p, and the votes that commit it.

Only this file of the benchmark uses `peer.swarm`. The group persists from one averaging to the next, as in production.
A round ends when the outer step is taken: the trainer continues then, while the resulting state is hashed. Matchmaking
is not measured: there are no trainer, directory and history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any, TextIO, TypeVar

import torch

from benchmarks.contributions import fill, relative_error
from benchmarks.member import MemberSetup, TimedAveraging, serve
from benchmarks.swarm_peer import RECIPE, RUN, TOKENS, run_peer
from peer.outer.compress.registry import compressor
from peer.outer.numerics.tiles import tile_ranges
from peer.outer.optim.optimizers import Nesterov
from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.round import Due, Group, link_of
from peer.outer.state.fragments import Fragments
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat
from peer.outer.state.wire_format import AnyUpdate, WireFormat
from peer.protocol.lineage import Certificate, Position
from peer.protocol.manifest import RecipeSpec, RoundSpec
from peer.protocol.weights import WeightRule
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.node import Node
from peer.swarm.round.exchange import Exchange
from peer.swarm.round.strategy_choice import strategies_of

FED_BACK = swarm_recipe(RecipeSpec(name="lagoon"))  # for int2: with error feedback on both legs, as it is meant
T = TypeVar("T")


class AtollMember:
    """Implements `Member`. Its methods run in a thread; the exchange runs in the main thread's loop, as in an agent.

    Args:
        setup: the run.
        node: the network.
        exchange: started.
        rosters: that it has.
        chain: what it takes for committed; filled here.
        loop: theirs.
    """

    def __init__(
        self, setup: MemberSetup, node: Node, exchange: Exchange, rosters: RosterAuthority, chain: list[Certificate],
        wire: WireFormat, loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        self._setup, self._node, self._exchange, self._rosters, self._loop = setup, node, exchange, rosters, loop
        self._chain = chain
        anchor, momentum = torch.zeros(2, setup.numel).fill_(0.0)  # written, so that its memory counts before a round
        self._state = OuterState(anchor, [momentum], Nesterov(lr=0.7, momentum=0.6), wire)
        self._digest = self._state.lineage_id = self._state.digest()
        self._vector = torch.empty(setup.numel)
        self._group: Group | None = None
        self._update: AnyUpdate | None = None
        self._sequence = 0
        self.address = node.maddrs[0]

    def prepare(self) -> dict[str, str]:
        """Local parameters whose pseudo-gradient is the contribution (the state is zero again); a signed join."""
        for tensor in (self._state.anchor, *self._state.buffers):
            tensor.zero_()
        fill(self._vector, self._setup.index, self._setup.seed)
        self._vector.neg_()
        _, sealed = self._rosters.join(self._position(), TOKENS)
        return {"peer_id": self._node.peer_id, "sealed": sealed.hex()}

    def meet(self, gathered: Sequence[dict[str, str]]) -> None:
        """Check the joins and form the group, unless it exists already."""
        if self._exchange.can_continue(self._position()):
            return
        joins = {}
        for one in gathered:
            sealed = bytes.fromhex(one["sealed"])
            joins[one["peer_id"]] = sealed, self._rosters.open_join(sealed, one["peer_id"], self._position())
        _, self._group = self._rosters.write(joins)

    def average(self) -> TimedAveraging:
        """Join, exchange, sign and collect the votes, take the outer step; then hash the state while no peer waits."""
        began = time.monotonic()
        phases = self._wait(self._round())
        ended = time.monotonic()
        self._state.digest()
        return TimedAveraging(began=began, ended=ended, phases=phases)

    async def _round(self) -> dict[str, float]:
        state, position = self._state, self._position()
        self._sequence += 1
        due = Due(self._sequence, TOKENS, self._vector)
        marks = [time.monotonic()]
        if self._exchange.can_continue(position):
            self._group = await self._exchange.next_round(due, state, position, self._setup.timeout_s)
        group = self._group
        assert group is not None
        marks.append(time.monotonic())
        exchanged = await self._exchange.exchange(group, due, state)
        marks.append(time.monotonic())
        link = await link_of(group, exchanged, state, self._digest)
        marks.append(time.monotonic())
        certificate = await self._exchange.commit(group, link)
        marks.append(time.monotonic())
        await asyncio.to_thread(state.apply, exchanged.update, state.round + 1, link.id)
        marks.append(time.monotonic())
        self._chain.append(certificate)
        self._update = exchanged.update
        names = ("join", "exchange", "link", "commit", "install")
        return dict(zip(names, (b - a for a, b in pairwise(marks)), strict=True))

    def check(self) -> float:
        """End the round; the group stays."""
        assert self._group is not None
        assert self._update is not None
        self._wait(self._exchange.release(self._group, None, self._position()))
        update, self._update = self._update, None
        for start, stop in tile_ranges(0, update.numel):
            self._vector[start:stop] = update.decode_range(start, stop)
        return relative_error(self._vector, self._setup.peers, self._setup.seed)

    def close(self) -> None:
        """Nothing to do: the loop's owner closes the node."""

    def _position(self) -> Position:
        return Position(round=self._state.round, lineage_id=self._state.lineage_id, weight=0)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def start(setup: MemberSetup, node: Node, answers: TextIO) -> Callable[[], None]:
    """See `run_peer`."""
    rosters = RosterAuthority(node.identity, RUN, RoundSpec(max_group=setup.peers), WeightRule(nominal_tokens=TOKENS))
    recipe, chain = FED_BACK if setup.codec == FED_BACK.compressor else RECIPE, list[Certificate]()
    wire = ReduceFormat(setup.numel, compressor(setup.codec))
    strategies = strategies_of(recipe, Fragments.of(wire), node.identity, lambda: chain)
    exchange = Exchange(node, rosters, setup.timeout_s, strategies)
    await exchange.start()
    member = AtollMember(setup, node, exchange, rosters, chain, wire, asyncio.get_running_loop())
    return lambda: serve(member, answers)


if __name__ == "__main__":
    run_peer(start)
