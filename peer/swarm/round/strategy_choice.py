"""Which exchange a recipe asks for."""

from __future__ import annotations

from peer.outer.recipe.recipe import Recipe
from peer.outer.state.wire_format import WireFormat
from peer.protocol.identity import Identity
from peer.swarm.round.all_gather import AllGather
from peer.swarm.round.butterfly import ButterflyAllReduce
from peer.swarm.round.reducer_residual import Chain
from peer.swarm.round.strategy import ExchangeStrategy


def strategy_of(recipe: Recipe, wire: WireFormat, identity: Identity, chain: Chain) -> ExchangeStrategy:
    """The exchange of a recipe.

    Args:
        recipe: what a reducer makes of the contributions to its shard, and whether losses are fed back.
        chain: -> what has been committed, to the state that the next round starts from: with error feedback a reducer
            carries on from what it says.
    """
    if recipe.exchange == "reduce":
        return ButterflyAllReduce(recipe, wire, identity, chain)
    return AllGather(identity, recipe, wire)
