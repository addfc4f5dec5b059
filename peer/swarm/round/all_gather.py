"""The arithmetic of a gather round: each whole payload is sent to all, and every member aggregates all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from peer.outer.round import Group
from peer.protocol.statements import Leaves, Seal, has_sent, root_of, seal_sent
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.signatures import MalformedError, ReducedShards, ReductionProof, close_gathering
from peer.swarm.round.strategy import Contribute, ExchangeStrategy, Produced


class AllGather(ExchangeStrategy):
    """What a recipe makes of whole payloads, and what is fed back of this peer's losses."""

    async def produce(
        self, buffers: RoundBuffers, group: Group, contribute: Contribute, keep: bool,  # noqa: ARG002
        on_signed: Callable[[ReductionProof], None],
    ) -> Produced:  # fmt: skip
        """Encode this peer's contribution, bind it, and send it once all others are bound; there is nothing to audit.

        See `ExchangeStrategy.produce`.
        """
        self.say_what_is_borne(len(group.members))
        whole = memoryview(await contribute(0, self.wire.numel, None))
        slices = list(_cut(whole, buffers.broadcast_bytes(buffers.me)))
        bound = await self.compute(_leaves_of, slices)
        buffers.own.leaves.set_result(bound)
        seals = {peer_id: await inbox.sent for peer_id, inbox in buffers.inboxes.items()}
        shown = close_gathering(self._identity, buffers.sitting.result(), seals, bound)
        for future, content in zip(buffers.own.reduced, slices, strict=True):
            future.set_result(content)
        on_signed(shown)
        buffers.own.seal.set_result(shown.seal)
        return Produced(whole)

    async def seal(self, buffers: RoundBuffers, reducer: str, leaves: Leaves) -> Seal:  # noqa: ARG002
        """Sign the payload that this peer will send to all, before it has seen any other, so that no member can copy or
        adapt to another's contribution.
        """
        sitting, bound = await asyncio.shield(buffers.sitting), await asyncio.shield(buffers.own.leaves)
        return seal_sent(self._identity, sitting, reducer, root_of(bound.digests))

    async def hear(self, buffers: RoundBuffers) -> ReducedShards:
        """See `ExchangeStrategy.hear`; MalformedError also for a payload that its member was not bound to."""
        heard = await super().hear(buffers)
        for peer_id, (_, leaves) in heard.reduced.items():
            signature = buffers.inboxes[peer_id].sent.result().signature
            if not has_sent(heard.sitting, peer_id, buffers.order[buffers.me], root_of(leaves), signature):
                raise MalformedError("it sent another payload than it had bound itself to", peer_id, "reduced")
        return heard


def _cut(whole: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield whole[start : start + size]
        start += size


def _leaves_of(slices: Sequence[memoryview]) -> Leaves:
    leaves = Leaves()
    for content in slices:
        leaves.add(content)
    return leaves
