"""What arrives in one round: an inbox for each other member, and the session that holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.outer.compress.sliced import Sliced
from peer.outer.fragments import partition
from peer.outer.round import Group, RoundAborted
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, AbortMessage, JoinMessage, Kind, VoteMessage
from peer.swarm.pipe import blank
from peer.swarm.streams import Stream

T = TypeVar("T")
Slices = Sequence[tuple[int, int]]


class Inbox:
    """What one other member sends in one round: futures that hold the bytes, of the right number, or why they never
    come.

    Attributes:
        join: its sealed join and what that says, in the rounds of a standing group after the first.
        parts: one future for each slice of its contribution to this peer's part.
        reduced: the part that it reduced, whole.
        vote: its vote.
    """

    def __init__(self, part_sizes: Sequence[int], reduced_sizes: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        self.join: asyncio.Future[tuple[bytes, JoinMessage]] = loop.create_future()
        self.parts: list[asyncio.Future[Payload]] = [loop.create_future() for _ in part_sizes]
        self.reduced: asyncio.Future[Payload] = loop.create_future()
        self.vote: asyncio.Future[VoteMessage] = loop.create_future()
        self._part_sizes, self._reduced_sizes = tuple(part_sizes), tuple(reduced_sizes)

    async def fill(self, stream: Stream) -> None:
        """Read one round from the stream: slices of both kinds, each kind in order, then the vote.

        Raises:
            ProtocolError, StreamClosedError, RoundAborted: nothing more comes; the caller tells the futures.
        """
        parts, reduced, position = 0, 0, 0
        body = blank(sum(self._reduced_sizes))
        if not self._reduced_sizes:
            _deliver(self.reduced, body)
        while True:
            expected = {Kind.ABORT: MAX_MESSAGE_BYTES}
            if parts < len(self._part_sizes):
                expected[Kind.PART] = self._part_sizes[parts]
            if reduced < len(self._reduced_sizes):
                expected[Kind.REDUCED] = self._reduced_sizes[reduced]
            if len(expected) == 1:
                break
            kind, length = await stream.receive_header(expected)
            if kind is Kind.ABORT:
                raise await _aborted_by(stream, length)
            if length != expected[kind]:
                raise ProtocolError(f"{stream.remote} sent {length} bytes of {kind.name}; must be {expected[kind]}")
            if kind is Kind.PART:
                piece = blank(length)
                await stream.receive_body(piece)
                _deliver(self.parts[parts], piece)
                parts += 1
            else:
                await stream.receive_body(body[position : position + length])
                reduced, position = reduced + 1, position + length
                if reduced == len(self._reduced_sizes):
                    _deliver(self.reduced, body)
        await self._fill_vote(stream)

    async def _fill_vote(self, stream: Stream) -> None:
        kind, length = await stream.receive_header({Kind.VOTE: MAX_MESSAGE_BYTES, Kind.ABORT: MAX_MESSAGE_BYTES})
        if kind is Kind.ABORT:
            raise await _aborted_by(stream, length)
        vote = bytearray(length)
        await stream.receive_body(memoryview(vote))
        _deliver(self.vote, parse_json(VoteMessage, bytes(vote)))

    def fail(self, abort: RoundAborted) -> None:
        """Nothing more comes."""
        _fail(abort, self.join, *self.parts, self.reduced, self.vote)


class Session:
    """One round of one group, from the first member that is ready to the certificate.

    Args:
        order: peer ids in roster order.
        me: this peer's place in it.
        numel: elements of the outer state.
        codec: of contributions and means.

    Attributes:
        bounds: [start, stop) of each member's part.
        outbound: the streams to the others.
        own_reduced: one future for each slice of this peer's part, to send as soon as it is there.
        own_vote: what is sent last.
        senders: a task for each other member, which sends it everything in order.
        group: known when all have joined.
        deadline: monotonic; infinite until the exchange begins.
    """

    def __init__(self, order: tuple[str, ...], me: int, numel: int, codec: Sliced, group: Group | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.order, self.me, self.codec, self.group = order, me, codec, group
        self.bounds = partition(numel, len(order), codec.block)
        sizes = [self.sizes(index) for index in range(len(order))]
        self.inboxes = {
            peer_id: Inbox(sizes[me], sizes[index]) for index, peer_id in enumerate(order) if index != me
        }
        self.outbound: dict[str, Stream] = {}
        self.own_reduced: list[asyncio.Future[bytes]] = [loop.create_future() for _ in sizes[me]]
        self.own_vote: asyncio.Future[VoteMessage] = loop.create_future()
        self.senders: dict[str, asyncio.Task[None]] = {}
        self.wire_bytes = sum(map(sum, sizes))
        self.deadline = float("inf")

    def slices(self, index: int) -> Slices:
        """The slices of that member's part, in elements."""
        return self.codec.slices(*self.bounds[index])

    def sizes(self, index: int) -> list[int]:
        """Bytes of each of them."""
        return [self.codec.base.wire_bytes(stop - start) for start, stop in self.slices(index)]

    def fail(self, peer_id: str, abort: RoundAborted) -> None:
        """Nothing more comes from this member."""
        self.inboxes[peer_id].fail(abort)

    def fail_joins(self, abort: RoundAborted) -> None:
        """Whoever has not joined will not."""
        _fail(abort, *(inbox.join for inbox in self.inboxes.values()))

    def late(self) -> tuple[str, list[str]]:
        """What is missing, and whose."""
        parts = [p for p, inbox in self.inboxes.items() if not all(future.done() for future in inbox.parts)]
        if parts:
            return "part", sorted(parts)
        return "reduced", sorted(p for p, inbox in self.inboxes.items() if not inbox.reduced.done())

    def close(self, abort: RoundAborted) -> None:
        """The round is over."""
        for inbox in self.inboxes.values():
            inbox.fail(abort)
        futures: tuple[asyncio.Future[Any], ...] = (*self.own_reduced, self.own_vote)
        for future in futures:
            future.cancel()


def _fail(abort: RoundAborted, *futures: asyncio.Future[Any]) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(abort)
            future.exception()  # retrieved: a future that nobody awaits any more is not a bug


def _deliver(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # done already when the round ended meanwhile
        future.set_result(value)


async def _aborted_by(stream: Stream, length: int) -> RoundAborted:
    body = bytearray(length)
    await stream.receive_body(memoryview(body))
    message = parse_json(AbortMessage, bytes(body))
    return RoundAborted("exchange", f"{stream.remote} gave up: {message.reason}", culprit=message.culprit)
