"""The arithmetic of one exchange, slice by slice: encode what this peer contributes, reduce what others do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peer.outer.aggregate.base import Aggregator
from peer.outer.aggregate.reduce import Encode, ReduceRule, bound, mean_cosine, reduce_range
from peer.outer.compress.base import Compressor, MemberPayloadError, Payload
from peer.outer.compress.registry import compressor
from peer.outer.compress.residual import DeferredResidual
from peer.outer.numerics.offload import is_small, run_offloaded
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import MAX_DROPS, Drop
from peer.outer.round import Due, Exchanged, Group, RoundAborted
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import Update
from peer.protocol.identity import Identity
from peer.protocol.statements import Leaves
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.partition import ReducePartition
from peer.swarm.round.reducer_residual import Chain, ReducerResidual
from peer.swarm.round.signatures import MalformedError, ReductionProof
from peer.swarm.round.strategy import Contribute, ExchangeStrategy, Feedback, Produced, T, named
from peer.swarm.runtime.futures import settled


class ButterflyAllReduce(ExchangeStrategy):
    """The butterfly: what a recipe makes of contributions, and what is fed back of both legs' losses.

    Args:
        chain: -> what has been committed, to the state that the next round starts from.
    """

    def __init__(self, recipe: Recipe, numel: int, identity: Identity, chain: Chain) -> None:
        super().__init__(identity, recipe)
        self._small = is_small(numel)
        # Feedback on both legs: of what this peer contributes, and of what it reduces for all.
        self._lost: DeferredResidual | None = None
        self._lost_in_reducing: ReducerResidual | None = None
        if recipe.feedback is not None:
            block = compressor(recipe.compressor).block
            self._lost = DeferredResidual(recipe.feedback, numel)
            self._lost_in_reducing = ReducerResidual(recipe.feedback.on_return, numel, block, identity.peer_id, chain)

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """See `ExchangeStrategy.compute`; of a small state, slices are less work than the way to a thread."""
        return work(*arguments) if self._small else await super().compute(work, *arguments)

    def feedbacks(self) -> Sequence[Feedback]:
        return [residual for residual in (self._lost, self._lost_in_reducing) if residual is not None]

    def contribution(self, due: Due, state: OuterState) -> Contribute:

        def work(start: int, stop: int, leaves: Leaves) -> Payload:
            (payload,) = state.encode_contribution(due.snapshot, ((start, stop),), self._lost)
            leaves.add(payload)
            return payload

        async def encode(start: int, stop: int, leaves: Leaves) -> Payload:
            return await self.compute(work, start, stop, leaves)

        return encode

    async def produce(
        self,
        buffers: RoundBuffers,
        group: Group,
        contribute: Contribute,
        keep: bool,
        on_signed: Callable[[ReductionProof], None],
    ) -> Produced:
        """Reduce this peer's shard, slice by slice as they arrive; see `ExchangeStrategy.produce`."""
        codec = _cut_of(buffers).codec
        members = len(group.members)
        self.say_what_is_borne(members)
        lost, residual = self._lost_in_reducing, None
        if lost is not None:
            residual = await self.compute(lost.begin, *_cut_of(buffers).bounds(members)[buffers.me], keep)
        job = _ShardReduction(buffers, group, bound(self._aggregator, members), lost)
        kept: list[list[Payload]] = [[] for _ in buffers.order]
        whole, written = memoryview(b""), 0
        for index, (start, stop) in enumerate(buffers.slices(buffers.me)):
            own = await contribute(start, stop, job.leaves[group.me])
            others = {peer_id: await inbox.contributed[index] for peer_id, inbox in buffers.inboxes.items()}
            for inbox in buffers.inboxes.values():  # a slice is freed as soon as it is reduced
                inbox.contributed[index] = settled(b"")
            payloads: list[Payload] = [own if peer == group.me else others[peer] for peer in buffers.order]
            for inputs, payload in zip(kept if keep else (), payloads, strict=False):
                inputs.append(payload)
            reduced = await self.compute(job.one, payloads, codec.base, start, stop)
            whole = whole or buffers.lend(sum(buffers.broadcast_bytes(buffers.me)))
            content = whole[written : written + len(reduced)]
            content[:] = reduced
            written += len(reduced)
            buffers.own.reduced[index].set_result(content)
        shown = await self.sign(buffers, job.leaves, job.outputs, kept if keep else (), residual)
        on_signed(shown)
        buffers.own.seal.set_result(shown.seal)
        return Produced(whole, mean_cosine(job.gram), job.drops(len(buffers.own.reduced)))

    @property
    def reducers_feed_back(self) -> bool:
        return self._lost_in_reducing is not None

    def residuals(self, buffers: RoundBuffers) -> tuple[str, ...]:
        if not self.reducers_feed_back:
            return ()
        seals = {peer_id: inbox.signed for peer_id, inbox in buffers.inboxes.items()}
        return tuple(seals.get(peer_id, buffers.own.seal).result().residual.hex() for peer_id in buffers.order)

    async def finish(
        self, buffers: RoundBuffers, group: Group, payloads: Sequence[Payload], own: Produced, state: OuterState  # noqa: ARG002
    ) -> Exchanged:
        update = await run_offloaded(state.numel, checked_update, buffers, tuple(payloads), state.numel)
        return Exchanged(update, own.cosine, own.dropped)


class _ShardReduction:
    """One shard of one round."""

    def __init__(
        self, buffers: RoundBuffers, group: Group, aggregator: Aggregator, lost: ReducerResidual | None
    ) -> None:
        self.aggregator = aggregator
        self.gram: Tensor = torch.zeros(len(group.members), len(group.members), dtype=torch.float64)
        self.leaves = {peer_id: Leaves() for peer_id in buffers.order}
        self.outputs = Leaves()
        self._me, self._order, self._lost = group.me, buffers.order, lost
        self._weights = [member.tokens for member in group.members]
        self._dropped: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._room: Tensor | None = None

    def one(self, payloads: list[Payload], codec: Compressor, start: int, stop: int) -> bytes:
        """Aggregate the slice [start, stop) and encode the result once."""
        for peer_id, payload in zip(self._order, payloads, strict=True):
            if peer_id != self._me:
                self.leaves[peer_id].add(payload)
        dropped: dict[int, str] = {}
        rule = ReduceRule(compressor=codec, aggregator=self.aggregator, encode=self._encode(codec, start))
        try:
            reduced = reduce_range(
                payloads, self._weights, stop - start, rule, self.gram, dropped, self._room_of(stop - start)
            )
        except MemberPayloadError as error:
            raise MalformedError(f"malformed contribution: {error}", self._order[error.place]) from None
        except ValueError as error:  # a gate dropped all, or the aggregate left fp32's range
            raise RoundAborted("exchange", f"no aggregate: {error}") from None
        for place, reason in dropped.items():
            self._dropped[self._order[place]] += 1
            self._reasons.setdefault(self._order[place], named(reason, self._order))
        self.outputs.add(reduced)
        return reduced

    def drops(self, slices: int) -> tuple[Drop, ...]:
        """The members that the aggregator left out, of so many slices."""
        return tuple(
            Drop(peer_id=peer_id, slices=count, of=slices, reason=self._reasons[peer_id])
            for peer_id, count in self._dropped.most_common(MAX_DROPS)
        )

    def _room_of(self, numel: int) -> Tensor:
        """Scratch for slices of so many values, of which only the last may be shorter."""
        if self._room is None:
            self._room = torch.empty(len(self._weights), numel)
        return self._room

    def _encode(self, codec: Compressor, start: int) -> Encode | None:
        lost = self._lost
        return None if lost is None else lambda n, read: lost.encode(codec, start, start + n, read)


def _cut_of(buffers: RoundBuffers) -> ReducePartition:
    cut = buffers.cut
    assert isinstance(cut, ReducePartition), "payloads are gathered, not reduced"
    return cut


def checked_update(buffers: RoundBuffers, shards: tuple[Payload, ...], numel: int) -> Update:
    """The update of these shards; raises RoundAborted, with the reducer's name, where one is malformed."""
    try:
        return Update(shards, numel, _cut_of(buffers).codec)
    except MemberPayloadError as error:
        raise MalformedError(f"malformed mean: {error}", buffers.order[error.place]) from None
