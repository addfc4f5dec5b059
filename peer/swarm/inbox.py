"""What arrives in one round: an inbox for each other member, and the session that holds them."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from peer.errors import ProtocolError
from peer.outer.compress.base import Compressor
from peer.outer.fragments import partition
from peer.outer.round import Group, RoundAborted
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, AbortMessage, Kind, VoteMessage
from peer.swarm.streams import Stream, StreamClosedError

T = TypeVar("T")


class Inbox:
    """What one other member sends in this round: three futures that hold the checked bytes, or why they never come."""

    def __init__(self, part_bytes: int, reduced_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.part: asyncio.Future[bytes] = loop.create_future()
        self.reduced: asyncio.Future[bytes] = loop.create_future()
        self.vote: asyncio.Future[VoteMessage] = loop.create_future()
        self._lengths = (part_bytes, reduced_bytes)

    async def fill(self, stream: Stream) -> None:
        """Read the stream in its one legal order."""
        try:
            _deliver(self.part, await self._bulk(stream, Kind.PART, self._lengths[0]))
            _deliver(self.reduced, await self._bulk(stream, Kind.REDUCED, self._lengths[1]))
            kind, body = await stream.receive({Kind.VOTE: MAX_MESSAGE_BYTES, Kind.ABORT: MAX_MESSAGE_BYTES})
            if kind is Kind.ABORT:
                raise _aborted_by(stream.remote, body)
            _deliver(self.vote, parse_json(VoteMessage, body))
        except (ProtocolError, StreamClosedError) as error:
            self.fail(RoundAborted("exchange", str(error), culprit=stream.remote))
        except RoundAborted as abort:
            self.fail(abort)

    def fail(self, abort: RoundAborted) -> None:
        for future in (self.part, self.reduced, self.vote):
            if not future.done():
                future.set_exception(abort)
                future.exception()  # retrieved: a future that nobody awaits any more is not a bug

    @staticmethod
    async def _bulk(stream: Stream, kind: Kind, length: int) -> bytes:
        got, body = await stream.receive({kind: length, Kind.ABORT: MAX_MESSAGE_BYTES})
        if got is Kind.ABORT:
            raise _aborted_by(stream.remote, body)
        if len(body) != length:
            raise ProtocolError(f"{stream.remote} sent {len(body)} bytes of {kind.name}; must be {length}")
        return body


class Session:
    """One round of one group, from the roster to the certificate."""

    def __init__(self, group: Group, numel: int, compressor: Compressor, deadline: float) -> None:
        self.group, self.compressor, self.deadline = group, compressor, deadline
        self.bounds = partition(numel, len(group.members), compressor.block)
        sizes = [compressor.wire_bytes(stop - start) for start, stop in self.bounds]
        self.inboxes = {
            member.peer_id: Inbox(sizes[group.index], sizes[index])
            for index, member in enumerate(group.members)
            if index != group.index
        }
        self.outbound: dict[str, Stream] = {}
        self.wire_bytes = sum(sizes)


def _deliver(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # done already when the round ended meanwhile
        future.set_result(value)


def _aborted_by(remote: str, body: bytes) -> RoundAborted:
    message = parse_json(AbortMessage, body)
    return RoundAborted("exchange", f"{remote} gave up: {message.reason}", culprit=message.culprit)
