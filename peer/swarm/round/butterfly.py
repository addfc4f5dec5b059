"""The arithmetic of one exchange, slice by slice: encode what this peer contributes, reduce what others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peer.outer.compress.base import Payload
from peer.outer.math.aggregation import Aggregation
from peer.outer.numerics.offload import is_small
from peer.outer.recipe.recipe import Recipe
from peer.outer.round import Group
from peer.outer.state.wire_format import WireFormat
from peer.protocol.identity import Identity
from peer.protocol.statements import Leaves
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.reducer_residual import Chain, ReducerResidual
from peer.swarm.round.signatures import ReductionProof
from peer.swarm.round.strategy import Contribute, ExchangeStrategy, Feedback, Produced, T, blamed
from peer.swarm.runtime.futures import settled


class ButterflyAllReduce(ExchangeStrategy):
    """The butterfly: what a recipe makes of contributions, and what is fed back of both legs' losses.

    Args:
        chain: -> what has been committed, to the state that the next round starts from.
        fragment: that `wire` writes.
    """

    def __init__(
        self, recipe: Recipe, wire: WireFormat, identity: Identity, chain: Chain, fragment: int = 0
    ) -> None:
        super().__init__(identity, recipe, wire)
        self._small = is_small(wire.numel)
        self._lost_in_reducing: ReducerResidual | None = None
        if recipe.feedback is not None:
            own_id = identity.peer_id
            self._lost_in_reducing = ReducerResidual(recipe.feedback.on_return, wire, own_id, chain, fragment)

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """See `ExchangeStrategy.compute`; of a small state, slices are less work than the way to a thread."""
        return work(*arguments) if self._small else await super().compute(work, *arguments)

    def feedbacks(self) -> Sequence[Feedback]:
        """See `ExchangeStrategy.feedbacks`: of what this peer contributes, and of what it reduces for all."""
        return [*super().feedbacks(), *([] if self._lost_in_reducing is None else [self._lost_in_reducing])]

    async def produce(
        self,
        buffers: RoundBuffers,
        group: Group,
        contribute: Contribute,
        keep: bool,
        on_signed: Callable[[ReductionProof], None],
    ) -> Produced:
        """Reduce this peer's shard, slice by slice as they arrive; see `ExchangeStrategy.produce`."""
        members = len(group.members)
        self.say_what_is_borne(members)
        lost, residual = self._lost_in_reducing, None
        if lost is not None:
            residual = await self.compute(lost.begin, *buffers.wire.bounds(members)[buffers.me], keep)
        aggregation = Aggregation(self._aggregator, [member.tokens for member in group.members])
        leaves, outputs = {peer_id: Leaves() for peer_id in buffers.order}, Leaves()

        def reduce(payloads: Sequence[Payload], start: int, stop: int) -> bytes:
            for peer_id, payload in zip(buffers.order, payloads, strict=True):
                if peer_id != group.me:
                    leaves[peer_id].add(payload)
            with blamed(buffers.order, "contribution"):
                reduced = self.wire.reduce(aggregation, payloads, start, stop, lost)
            outputs.add(reduced)
            return reduced

        kept: list[list[Payload]] = [[] for _ in buffers.order]
        whole, written = memoryview(b""), 0
        for index, (start, stop) in enumerate(buffers.slices(buffers.me)):
            own = await contribute(start, stop, leaves[group.me])
            others = {peer_id: await inbox.contributed[index] for peer_id, inbox in buffers.inboxes.items()}
            for inbox in buffers.inboxes.values():  # a slice is freed as soon as it is reduced
                inbox.contributed[index] = settled(b"")
            payloads: list[Payload] = [own if peer == group.me else others[peer] for peer in buffers.order]
            for inputs, payload in zip(kept if keep else (), payloads, strict=False):
                inputs.append(payload)
            reduced = await self.compute(reduce, payloads, start, stop)
            whole = whole or buffers.lend(sum(buffers.broadcast_bytes(buffers.me)))
            content = whole[written : written + len(reduced)]
            content[:] = reduced
            written += len(reduced)
            buffers.own.reduced[index].set_result(content)
        shown = await self.sign(buffers, leaves, outputs, kept if keep else (), residual)
        on_signed(shown)
        buffers.own.seal.set_result(shown.seal)
        return Produced(whole, aggregation)

    @property
    def reducers_feed_back(self) -> bool:
        return self._lost_in_reducing is not None

    def residuals(self, buffers: RoundBuffers) -> tuple[str, ...]:
        if not self.reducers_feed_back:
            return ()
        seals = {peer_id: inbox.signed for peer_id, inbox in buffers.inboxes.items()}
        return tuple(seals.get(peer_id, buffers.own.seal).result().residual.hex() for peer_id in buffers.order)
