"""The arithmetic of one exchange, slice by slice: encode what this peer contributes, reduce what others do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from peer.outer.aggregate import Aggregator
from peer.outer.compress.base import Compressor, Payload, PayloadError, Read
from peer.outer.compress.feedback import Residual
from peer.outer.compress.sliced import Sliced
from peer.outer.recipes import Recipe
from peer.outer.round import Due, Group, RoundAborted, bound, mean_cosine, reduce_range
from peer.outer.state import OuterState, Update
from peer.swarm.inbox import Session

Contribute = Callable[[int, int], Awaitable[bytes]]
Encode = Callable[[int, Read], bytes]
T = TypeVar("T")


class SliceWork:
    """What a recipe makes of contributions, and what is fed back of both legs' losses.

    Args:
        recipe: aggregator and error feedback.
        numel: elements of the outer state.
    """

    def __init__(self, recipe: Recipe, numel: int) -> None:
        self._aggregator = recipe.aggregator
        # Feedback on both legs: of what this peer contributes, and of what it reduces for all.
        self._lost = None if recipe.feedback is None else Residual(recipe.feedback, numel)
        self._lost_in_reducing = None if recipe.feedback is None else Residual(recipe.feedback.on_return, numel)
        self._running: set[asyncio.Future[Any]] = set()

    async def commit(self) -> None:
        """The round was applied."""
        await self._settle(Residual.commit)

    async def revert(self) -> None:
        """The round was abandoned: nothing is lost of what was encoded for it."""
        await self._settle(Residual.revert)

    async def idle(self) -> None:
        """No thread works for the round any more: a thread cannot be cancelled."""
        if self._running:
            await asyncio.wait(self._running)

    async def _settle(self, end: Callable[[Residual], None]) -> None:
        await self.idle()  # what is encoded late would be counted twice
        for residual in (self._lost, self._lost_in_reducing):
            if residual is not None:
                await asyncio.to_thread(end, residual)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        running = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # retrieved: raised where somebody still waits

    def contribution(self, due: Due, state: OuterState) -> Contribute:
        """(start, stop) -> this slice of this peer's contribution, encoded in a thread."""

        async def encode(start: int, stop: int) -> bytes:
            bounds = ((start, stop),)
            (payload,) = await self._in_thread(state.encode_contribution, due.snapshot, bounds, self._lost)
            return payload

        return encode

    async def reduce(self, session: Session, group: Group, contribute: Contribute) -> tuple[bytes, float | None]:
        """Reduce this peer's part as its slices arrive; -> its payload, and the mean cosine of the contributions.

        Raises:
            RoundAborted: a contribution is malformed, its member named; or there is no aggregate.
        """
        members = len(group.members)
        job = _Reduction(session, group, bound(self._aggregator, members), self._lost_in_reducing)
        slices = session.slices(session.me)
        arrived: list[list[Payload]] = []
        reduced: list[bytes] = []
        for index, (start, stop) in enumerate(slices):
            own = await contribute(start, stop)
            others = {peer_id: await inbox.parts[index] for peer_id, inbox in session.inboxes.items()}
            for inbox in session.inboxes.values():  # a slice is freed as soon as it is reduced
                inbox.parts[index] = _spent()
            payloads: list[Payload] = [own if peer == group.me else others[peer] for peer in session.order]
            if job.aggregator.separable:
                reduced.append(await self._in_thread(job.one, payloads, session.codec.base, start, stop))
                session.own_reduced[index].set_result(reduced[-1])
            else:
                arrived.append(payloads)
        if not job.aggregator.separable and slices:
            reduced = [await self._in_thread(job.whole, arrived, session.codec, slices[0][0], slices[-1][1])]
            position = 0
            for future, size in zip(session.own_reduced, session.sizes(session.me), strict=True):
                future.set_result(reduced[0][position : position + size])
                position += size
        return b"".join(reduced), mean_cosine(job.gram)


class _Reduction:
    """One part of one round."""

    def __init__(self, session: Session, group: Group, aggregator: Aggregator, lost: Residual | None) -> None:
        self.aggregator = aggregator
        self.gram: Tensor = torch.zeros(len(group.members), len(group.members), dtype=torch.float64)
        self._order, self._lost = session.order, lost
        self._weights = [member.tokens for member in group.members]

    def whole(self, slices: list[list[Payload]], codec: Sliced, start: int, stop: int) -> bytes:
        """A part that must be aggregated as a whole."""
        return self.one([b"".join(pieces) for pieces in zip(*slices, strict=True)], codec, start, stop)

    def one(self, payloads: list[Payload], codec: Compressor, start: int, stop: int) -> bytes:
        """Aggregate [start, stop) and encode the result once."""
        try:
            return reduce_range(
                payloads, self._weights, stop - start, codec, self.aggregator, self.gram, self._encode(codec, start)
            )
        except PayloadError:
            self._blame(payloads, codec, stop - start)
            raise
        except ValueError as error:  # a gate dropped everybody, or the aggregate left fp32's range
            raise RoundAborted("exchange", f"no aggregate: {error}") from None

    def _encode(self, codec: Compressor, start: int) -> Encode | None:
        lost = self._lost
        return None if lost is None else lambda n, read: lost.encode(codec, start, start + n, read)

    def _blame(self, payloads: list[Payload], codec: Compressor, numel: int) -> None:
        for peer_id, payload in zip(self._order, payloads, strict=True):
            try:
                codec.decode(payload, numel)
            except PayloadError as error:
                raise RoundAborted("exchange", f"malformed contribution: {error}", culprit=peer_id) from None


def _spent() -> asyncio.Future[Payload]:
    future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
    future.set_result(b"")
    return future


def checked_update(session: Session, parts: tuple[Payload, ...], numel: int) -> Update:
    """The update of these parts; raises RoundAborted, with the reducer's name, where one is malformed."""
    try:
        return Update(parts, numel, session.codec)
    except PayloadError:
        for peer_id, part, (start, stop) in zip(session.order, parts, session.bounds, strict=True):
            try:
                Update((part,), stop - start, session.codec)
            except PayloadError as error:
                raise RoundAborted("exchange", f"malformed mean: {error}", culprit=peer_id) from None
        raise
