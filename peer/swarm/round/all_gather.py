"""The arithmetic of a gather round: each whole payload is sent to all, and every member aggregates all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from peer.outer.compress.base import MemberPayloadError, Payload
from peer.outer.compress.feedback import Encoder
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import MAX_DROPS, Drop
from peer.outer.round import Due, Exchanged, Group, RoundAborted
from peer.outer.state.gathered_update import Gathered, GatherFormat
from peer.outer.state.outer_state import OuterState
from peer.protocol.identity import Identity
from peer.protocol.statements import Leaves, Seal, has_sent, root_of, seal_sent
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.signatures import MalformedError, ReducedShards, ReductionProof, close_gathering
from peer.swarm.round.strategy import Contribute, ExchangeStrategy, Produced, named


class AllGather(ExchangeStrategy):
    """What a recipe makes of whole payloads, and what is fed back of this peer's losses."""

    def __init__(self, recipe: Recipe, numel: int, identity: Identity) -> None:
        super().__init__(identity, recipe)
        self._feedback, self._numel = recipe.feedback, numel
        self._encoder: Encoder | None = None
        self._received: Tensor | None = None  # what the others will decode of this peer's payload

    def feedbacks(self) -> Sequence[Encoder]:
        return [] if self._encoder is None else [self._encoder]

    def contribution(self, due: Due, state: OuterState) -> Contribute:
        """See `ExchangeStrategy.contribution`: the one slice is the whole."""

        def work() -> bytes:
            if self._encoder is None:
                assert isinstance(state.compressor, GatherFormat), f"{state.compressor.name}: reduced, not gathered"
                self._encoder = Encoder(state.compressor.codec, self._feedback, self._numel)
            payload, self._received = state.encode_whole(due.snapshot, self._encoder)
            return payload

        async def encode(start: int, stop: int, leaves: Leaves) -> bytes:  # noqa: ARG001
            assert (start, stop) == (0, self._numel), f"[{start}, {stop}) is not the whole of {self._numel}"
            return await self.compute(work)

        return encode

    async def revert(self) -> None:
        await super().revert()
        self._received = None

    async def produce(
        self, buffers: RoundBuffers, group: Group, contribute: Contribute, keep: bool,  # noqa: ARG002
        on_signed: Callable[[ReductionProof], None],
    ) -> Produced:  # fmt: skip
        """Encode this peer's contribution, bind it, and send it once all others are bound; there is nothing to audit.

        See `ExchangeStrategy.produce`.
        """
        self.say_what_is_borne(len(group.members))
        whole = memoryview(await contribute(0, self._numel, Leaves()))
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
                raise MalformedError("it sent another payload than it had bound itself to", peer_id)
        return heard

    async def finish(
        self, buffers: RoundBuffers, group: Group, payloads: Sequence[Payload], own: Produced, state: OuterState  # noqa: ARG002
    ) -> Exchanged:
        weights = [member.tokens for member in group.members]
        received, self._received = self._received, None
        assert received is not None, "nothing was contributed"
        try:
            update = await self.compute(state.update_of, payloads, weights, {buffers.me: received})
        except MemberPayloadError as error:
            raise MalformedError(f"malformed contribution: {error}", buffers.order[error.place]) from None
        except ValueError as error:  # a gate dropped all, or the aggregate left fp32's range
            raise RoundAborted("exchange", f"no aggregate: {error}") from None
        assert isinstance(update, Gathered)
        drops = (
            Drop(peer_id=buffers.order[place], slices=1, of=1, reason=named(reason, buffers.order))
            for place, reason in update.dropped.items()
        )
        return Exchanged(update, update.cosine, tuple(drops)[:MAX_DROPS])


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
