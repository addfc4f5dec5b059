"""Which exchange a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable

from peer.outer.recipe.recipe import Recipe
from peer.outer.state.fragments import Fragments
from peer.outer.state.wire_format import WireFormat
from peer.protocol.identity import Identity
from peer.swarm.round.all_gather import AllGather
from peer.swarm.round.butterfly import ButterflyAllReduce
from peer.swarm.round.reducer_residual import Chain
from peer.swarm.round.strategy import ExchangeStrategy


def strategies_of(
    recipe: Recipe, fragments: Fragments, identity: Identity, chain: Chain
) -> Callable[[int], ExchangeStrategy]:
    """(rounds before) -> the exchange of a recipe, with what error feedback keeps of the fragment.

    Args:
        recipe: what a reducer makes of the contributions to its shard, and whether losses are fed back.
        chain: -> what has been committed, to the state that the next round starts from: with error feedback a reducer
            carries on from what it says.
    """

    def of_fragment(index: int, wire: WireFormat) -> ExchangeStrategy:
        if recipe.exchange == "gather":
            return AllGather(identity, recipe, wire)
        return ButterflyAllReduce(recipe, wire, identity, chain, index)

    strategies = [of_fragment(index, wire) for index, wire in enumerate(fragments.wires)]
    of_moments = strategies[0] if fragments.exact is None else of_fragment(0, fragments.exact)

    def of_round(round: int) -> ExchangeStrategy:
        turn = fragments.turns(round)
        return of_moments if turn.moments else strategies[turn.fragment]

    return of_round
