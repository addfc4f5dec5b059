"""What the arithmetic of every exchange has in common: threads, error feedback's transactions, signatures."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

from peer.outer.compress.base import MemberPayloadError, Payload, PayloadError
from peer.outer.compress.undoable import Undoable
from peer.outer.math.aggregation import Aggregation
from peer.outer.recipe.recipe import Recipe
from peer.outer.round import Due, Exchanged, Group, RoundAborted
from peer.outer.state.outer_state import OuterState
from peer.outer.state.wire_format import WireFormat
from peer.protocol.identity import Identity
from peer.protocol.statements import Leaves, Seal, root_of, seal_sent
from peer.protocol.word import Stage
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.reducer_residual import Attempt, ReducerResidual
from peer.swarm.round.signatures import MalformedError, ReducedShards, ReductionProof, close_reduction, hear

log = logging.getLogger(__name__)
FEWEST_TO_BEAR_ONE = 4  # a quarter
Contribute = Callable[[int, int, Leaves | None], Awaitable[Payload]]
Feedback = Undoable[Any, Any] | ReducerResidual
T = TypeVar("T")


class Produced(NamedTuple):
    """What this peer sends to all in a round; and of a shard that it has reduced, what it saw of the contributions."""

    payload: memoryview
    aggregation: Aggregation | None = None


class ExchangeStrategy(ABC):
    """What one kind of exchange makes of contributions."""

    def __init__(self, identity: Identity, recipe: Recipe, wire: WireFormat) -> None:
        self._identity, self._aggregator = identity, recipe.aggregator
        self.wire, self._sender = wire, wire.sender(recipe.feedback)
        self._said_of = 0
        self._running: set[asyncio.Future[Any]] = set()

    def feedbacks(self) -> Sequence[Feedback]:
        """All that is fed back."""
        return [] if self._sender.residual is None else [self._sender.residual]

    def contribution(self, due: Due, state: OuterState, share: int = 0) -> Contribute:
        """(start, stop, leaves) -> this slice of this peer's contribution, encoded and hashed in a thread.

        Args:
            share: this peer's own, where members do not all do the same.
        """
        source, round = state.source(due.snapshot), state.part.rounds

        def work(start: int, stop: int, leaves: Leaves | None) -> Payload:
            payload = self._sender.encode(source, start, stop, round, share)
            if leaves is not None:
                leaves.add(payload)
            return payload

        async def encode(start: int, stop: int, leaves: Leaves | None) -> Payload:
            return await self.compute(work, start, stop, leaves)

        return encode

    @abstractmethod
    async def produce(
        self,
        buffers: RoundBuffers,
        group: Group,
        contribute: Contribute,
        keep: bool,
        on_signed: Callable[[ReductionProof], None],
    ) -> Produced:
        """Make what this peer sends to all, a slice at a time.

        Args:
            keep: hold what has come, for audits; else a slice is freed as soon as it is reduced.
            on_signed: called with what can be shown of it, before any other peer has the signature.

        Raises:
            RoundAborted: a contribution is malformed, its member named; or there is no aggregate.
        """

    async def finish(
        self, buffers: RoundBuffers, group: Group, payloads: Sequence[Payload], own: Produced, state: OuterState
    ) -> Exchanged:
        """The update of all members' payloads, in roster order; raises RoundAborted, with the name of whose is
        malformed.
        """
        weights, received = [member.tokens for member in group.members], self._sender.received
        known, self._sender.received = {} if received is None else {buffers.me: received}, None
        with blamed(buffers.order, "reduced", "contribution" if own.aggregation is None else "mean"):
            update = await self.compute(buffers.wire.update, payloads, weights, state.part.rounds, known)
        aggregation = own.aggregation or update.aggregation
        assert aggregation is not None, "contributions were neither reduced nor gathered"
        return Exchanged(update, aggregation.cosine, aggregation.drops(buffers.order))

    @property
    def reducers_feed_back(self) -> bool:
        """Whether a reducer has a residual."""
        return False

    def residuals(self, buffers: RoundBuffers) -> tuple[str, ...]:  # noqa: ARG002
        """What each reducer has signed of its residual, in roster order; none without error feedback of reducers."""
        return ()

    def say_what_is_borne(self, members: int) -> None:
        """Warn, once for each size of the group, if a robust aggregator cannot tolerate a malicious member."""
        if self._aggregator.robust and members != self._said_of and members < FEWEST_TO_BEAR_ONE:
            message = "a group of %d cannot tolerate a malicious member; at least %d members are needed"
            log.warning(message, members, FEWEST_TO_BEAR_ONE)
        self._said_of = members

    async def commit(self) -> None:
        """The round was applied."""
        await self._settle(methodcaller("commit"))

    async def revert(self) -> None:
        """The round was abandoned: nothing is lost of what was encoded for it."""
        await self._settle(methodcaller("revert"))
        self._sender.received = None

    async def restore(self) -> None:
        """The round that this peer abandoned last was committed by others, with its contribution."""
        await self._settle(methodcaller("restore"))

    async def idle(self) -> None:
        """No thread works for the round any more: a thread cannot be cancelled."""
        if self._running:
            await asyncio.wait(self._running)

    async def _settle(self, end: Callable[[Feedback], None]) -> None:
        await self.idle()  # what is encoded late would be counted twice
        for feedback in self.feedbacks():
            await asyncio.to_thread(end, feedback)

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """What `work` returns, in a thread; `idle` waits for it even after its caller was cancelled."""
        running = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # retrieved: raised where it is still awaited

    async def seal(self, buffers: RoundBuffers, reducer: str, leaves: Leaves) -> Seal:
        """Sign what this peer sent to `reducer`, once all have joined."""
        sitting = await asyncio.shield(buffers.sitting)
        return seal_sent(self._identity, sitting, reducer, root_of(leaves.digests))

    async def hear(self, buffers: RoundBuffers) -> ReducedShards:
        """Check the reducers' signatures over the shards that have come whole. Raises MalformedError."""
        seals = {peer_id: inbox.signed.result() for peer_id, inbox in buffers.inboxes.items()}

        def work() -> ReducedShards:
            leaves = {peer_id: Leaves() for peer_id in seals}
            for peer_id in seals:
                position, inbox = 0, buffers.inboxes[peer_id]
                for size in inbox.lengths:
                    body = memoryview(inbox.reduced.result())
                    leaves[peer_id].add(body[position : position + size])
                    position += size
            return hear(buffers.sitting.result(), seals, leaves, self.reducers_feed_back)

        return await self.compute(work)

    async def sign(
        self,
        buffers: RoundBuffers,
        leaves: Mapping[str, Leaves],
        outputs: Leaves,
        payloads: Sequence[Sequence[Payload]],
        residual: Attempt | None,
    ) -> ReductionProof:
        """Check the others' signatures over what they sent to this peer, and make its own."""
        seals = {peer_id: await inbox.sent for peer_id, inbox in buffers.inboxes.items()}
        statement = (buffers.sitting.result(), leaves, seals, outputs, payloads, residual)
        return await self.compute(close_reduction, self._identity, *statement)


@contextmanager
def blamed(order: Sequence[str], stage: Stage, what: str = "contribution") -> Iterator[None]:
    """Names the member of a roster whose payload is malformed; raises MalformedError, RoundAborted.

    Args:
        stage: at which payloads came that are `what`.
    """
    try:
        yield
    except MemberPayloadError as error:
        raise MalformedError(f"malformed {what}: {error}", order[error.place], stage) from None
    except (ValueError, PayloadError) as error:  # a gate dropped all, or the aggregate left fp32's range
        raise RoundAborted("exchange", f"no aggregate: {error}") from None
