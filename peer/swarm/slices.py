"""The arithmetic of one exchange, slice by slice: encode what this peer contributes, reduce what others do."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from peer.outer.aggregate import Aggregator
from peer.outer.compress.base import Compressor, NonFiniteError, Payload, PayloadError, Read
from peer.outer.compress.feedback import Residual
from peer.outer.preview import Preview
from peer.outer.recipes import Recipe
from peer.outer.record import MAX_DROPS, MAX_REASON_CHARS, Drop
from peer.outer.reduce import bound, mean_cosine, reduce_range
from peer.outer.refusals import ROBUST
from peer.outer.round import Due, Group, RoundAborted
from peer.outer.state import OuterState, Update
from peer.protocol.identity import Identity
from peer.protocol.statements import Leaves, Seal, root_of, seal_sent
from peer.swarm.inbox import Session
from peer.swarm.pipe import blank
from peer.swarm.seals import Heard, Kept, MalformedError, close_reduction, hear

log = logging.getLogger(__name__)
FEWEST_TO_BEAR_ONE = 4  # a quarter
_PLACE = re.compile(r"contribution (\d+)$")
Contribute = Callable[[int, int, Leaves], Awaitable[bytes]]
Encode = Callable[[int, Read], bytes]
T = TypeVar("T")


class Reduced(NamedTuple):
    """One reduced part: its payload, the mean cosine of the contributions to it, and who was left out of it."""

    payload: memoryview
    cosine: float | None
    dropped: tuple[Drop, ...]


class SliceWork:
    """What a recipe makes of contributions, and what is fed back of both legs' losses.

    Args:
        recipe: aggregator and error feedback.
        numel: elements of the outer state.
        identity: signs what this peer sends and what it reduces.
    """

    def __init__(self, recipe: Recipe, numel: int, identity: Identity) -> None:
        self._aggregator, self._identity = recipe.aggregator, identity
        # Feedback on both legs: of what this peer contributes, and of what it reduces for all.
        self._lost = None if recipe.feedback is None else Residual(recipe.feedback, numel)
        self._lost_in_reducing = None if recipe.feedback is None else Residual(recipe.feedback.on_return, numel)
        self._running: set[asyncio.Future[Any]] = set()
        self._said_of = 0

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
        """(start, stop, leaves) -> this slice of this peer's contribution, encoded and hashed in a thread."""

        def work(start: int, stop: int, leaves: Leaves) -> bytes:
            (payload,) = state.encode_contribution(due.snapshot, ((start, stop),), self._lost)
            leaves.add(payload)
            return payload

        async def encode(start: int, stop: int, leaves: Leaves) -> bytes:
            return await self._in_thread(work, start, stop, leaves)

        return encode

    async def seal(self, session: Session, reducer: str, leaves: Leaves) -> Seal:
        """Sign what this peer sent to `reducer`, once all have joined."""
        sitting = await asyncio.shield(session.sitting)
        return seal_sent(self._identity, sitting, reducer, root_of(leaves.digests))

    async def hear(self, session: Session) -> Heard:
        """Check the reducers' signatures over the parts that have come whole. Raises MalformedError."""
        seals = {peer_id: inbox.signed.result() for peer_id, inbox in session.inboxes.items()}

        def work() -> Heard:
            leaves = {peer_id: Leaves() for peer_id in seals}
            for index, peer_id in enumerate(session.order):
                position = 0
                for size in session.sizes(index) if peer_id in seals else ():
                    body = memoryview(session.inboxes[peer_id].reduced.result())
                    leaves[peer_id].add(body[position : position + size])
                    position += size
            return hear(session.sitting.result(), seals, leaves)

        return await self._in_thread(work)

    async def reduce(
        self, session: Session, group: Group, contribute: Contribute, keep: bool, on_signed: Callable[[Kept], None]
    ) -> Reduced:
        """Reduce this peer's part, slice by slice as they arrive.

        Args:
            keep: hold what has come, for audits; else a slice is freed as soon as it is reduced.
            on_signed: called with what can be shown of the part, before anybody else has the signature.

        Raises:
            RoundAborted: a contribution is malformed, its member named; or there is no aggregate.
        """
        members = len(group.members)
        self._say_what_is_borne(members)
        job = _Reduction(session, group, bound(self._aggregator, members), self._lost_in_reducing)
        kept: list[list[Payload]] = [[] for _ in session.order]
        whole, written = blank(sum(session.sizes(session.me))), 0
        for index, (start, stop) in enumerate(session.slices(session.me)):
            own = await contribute(start, stop, job.leaves[group.me])
            others = {peer_id: await inbox.parts[index] for peer_id, inbox in session.inboxes.items()}
            for inbox in session.inboxes.values():  # a slice is freed as soon as it is reduced
                inbox.parts[index] = _spent()
            payloads: list[Payload] = [own if peer == group.me else others[peer] for peer in session.order]
            for pieces, payload in zip(kept if keep else (), payloads, strict=False):
                pieces.append(payload)
            reduced = await self._in_thread(job.one, payloads, session.codec.base, start, stop)
            piece = whole[written : written + len(reduced)]
            piece[:] = reduced
            written += len(reduced)
            session.own_reduced[index].set_result(piece)
            session.own_arriving = whole, index + 1
            session.moved.set()
        shown = await self._sign(session, job, kept if keep else ())
        on_signed(shown)
        session.own_seal.set_result(shown.seal)
        return Reduced(whole, mean_cosine(job.gram), job.drops(len(session.own_reduced)))

    async def preview(self, session: Session, state: OuterState) -> str | None:
        """The digest of the state that the round leads to, most of it computed while the reduced parts arrive.

        None: it is no state that could be committed, as whoever previews the whole update will hear.
        """
        preview = Preview(state, session.bounds)
        slices, known = [session.slices(index) for index in range(len(session.order))], [0] * len(session.order)
        try:
            while not preview.complete:
                session.moved.clear()
                arriving = session.arriving()
                for index, (_, count) in enumerate(arriving):
                    if count > known[index]:
                        preview.reach(index, slices[index][count - 1][1])
                        known[index] = count
                if preview.ready and self._running:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)  # others wait for that
                elif preview.ready:
                    await self._in_thread(preview.step, [body for body, _ in arriving])
                else:
                    await session.moved.wait()
        except (NonFiniteError, PayloadError):
            return None
        return preview.digest()

    async def _sign(self, session: Session, job: _Reduction, payloads: Sequence[Sequence[Payload]]) -> Kept:
        """Check the others' signatures and make this reducer's."""
        seals = {peer_id: await inbox.sent for peer_id, inbox in session.inboxes.items()}
        statement = (session.sitting.result(), job.leaves, seals, job.outputs, payloads)
        return await self._in_thread(close_reduction, self._identity, *statement)

    def _say_what_is_borne(self, members: int) -> None:
        if isinstance(self._aggregator, ROBUST) and members != self._said_of and members < FEWEST_TO_BEAR_ONE:
            log.warning("a group of %d: no lie can be borne, %d members bear one", members, FEWEST_TO_BEAR_ONE)
        self._said_of = members


class _Reduction:
    """One part of one round."""

    def __init__(self, session: Session, group: Group, aggregator: Aggregator, lost: Residual | None) -> None:
        self.aggregator = aggregator
        self.gram: Tensor = torch.zeros(len(group.members), len(group.members), dtype=torch.float64)
        self.leaves = {peer_id: Leaves() for peer_id in session.order}
        self.outputs = Leaves()
        self._me, self._order, self._lost = group.me, session.order, lost
        self._weights = [member.tokens for member in group.members]
        self._dropped: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def one(self, payloads: list[Payload], codec: Compressor, start: int, stop: int) -> bytes:
        """Aggregate the slice [start, stop) and encode the result once."""
        for peer_id, payload in zip(self._order, payloads, strict=True):
            if peer_id != self._me:
                self.leaves[peer_id].add(payload)
        dropped: dict[int, str] = {}
        try:
            reduced = reduce_range(
                payloads, self._weights, stop - start, codec, self.aggregator, self.gram, self._encode(codec, start),
                dropped,
            )  # fmt: skip
        except PayloadError:
            self._blame(payloads, codec, stop - start)
            raise
        except ValueError as error:  # a gate dropped everybody, or the aggregate left fp32's range
            raise RoundAborted("exchange", f"no aggregate: {error}") from None
        for place, reason in dropped.items():
            self._dropped[self._order[place]] += 1
            named = _PLACE.sub(lambda match: self._order[int(match[1])], reason)
            self._reasons.setdefault(self._order[place], named[:MAX_REASON_CHARS])
        self.outputs.add(reduced)
        return reduced

    def drops(self, slices: int) -> tuple[Drop, ...]:
        """Whom the aggregator left out, of so many slices."""
        return tuple(
            Drop(peer_id=peer_id, slices=count, of=slices, reason=self._reasons[peer_id])
            for peer_id, count in self._dropped.most_common(MAX_DROPS)
        )

    def _encode(self, codec: Compressor, start: int) -> Encode | None:
        lost = self._lost
        return None if lost is None else lambda n, read: lost.encode(codec, start, start + n, read)

    def _blame(self, payloads: list[Payload], codec: Compressor, numel: int) -> None:
        for peer_id, payload in zip(self._order, payloads, strict=True):
            try:
                codec.decode(payload, numel)
            except PayloadError as error:
                raise MalformedError(f"malformed contribution: {error}", peer_id) from None


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
                raise MalformedError(f"malformed mean: {error}", peer_id) from None
        raise
