"""What arrives in one round: an inbox for each other member, and the buffers of the round."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.outer.round import Group, RoundAborted
from peer.outer.state.wire_format import WireFormat
from peer.protocol.records import parse_json
from peer.protocol.statements import REDUCED_SEAL_BYTES, SEAL_BYTES, Leaves, ReducedSeal, Seal, Sitting
from peer.protocol.wire import MAX_MESSAGE_BYTES, AbortMessage, JoinMessage, Kind, VoteMessage
from peer.protocol.word import Stage
from peer.swarm.net.stream import FrameStream
from peer.swarm.round.arrivals import STAGES, Arrivals
from peer.swarm.round.giving_up import GaveUpError, Lack
from peer.swarm.round.lateness import Waited
from peer.swarm.round.signatures import ReducedShards, sitting_of
from peer.swarm.runtime.buffer_pool import Lend, blank
from peer.swarm.runtime.futures import deliver, fail, has_come

OVER = 0.98
"""Of the time of an exchange: its deadline has passed, as members begin at different moments."""
MEASURED_BYTES = 1 << 16  # of a frame whose time says how fast a line is


class Inbox:
    """What one other member sends in one round: futures that hold the bytes, of the right number, or why they never
    come.

    Attributes:
        join: its sealed join and what that says, in the rounds of a persistent group after the first.
        contributed: one future for each slice of its contribution to this peer's shard.
        sent: its signature over those.
        reduced: the shard that it reduced, whole.
        signed: its signature over that.
        counts: how many frames of each kind have come of these.
        lengths: of the slices that it reduced, as far as they have come.

    Args:
        contributed_sizes, reduced_sizes: bytes of each slice.
        lend: memory for the shard that it reduced.
        exact: whether these are no upper limits.
    """

    def __init__(
        self, contributed_sizes: Sequence[int], reduced_sizes: Sequence[int], lend: Lend = blank, *,
        exact: bool = True,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.join: asyncio.Future[tuple[bytes, JoinMessage]] = loop.create_future()
        self.contributed: list[asyncio.Future[Payload]] = [loop.create_future() for _ in contributed_sizes]
        self.sent: asyncio.Future[Seal] = loop.create_future()
        self.reduced: asyncio.Future[Payload] = loop.create_future()
        self.signed: asyncio.Future[ReducedSeal] = loop.create_future()
        self.vote: asyncio.Future[VoteMessage] = loop.create_future()
        self.counts = dict.fromkeys((Kind.CONTRIBUTION, Kind.SEAL_SENT, Kind.REDUCED, Kind.SEAL_REDUCED), 0)
        self._contributed_sizes, self._reduced_sizes, self._lend = tuple(contributed_sizes), tuple(reduced_sizes), lend
        self.lengths, self._exact = list[int](), exact
        self._measured_bytes, self._measured_s = 0, 0.0

    async def fill(self, stream: FrameStream) -> None:
        """Read one round from the stream: slices of both kinds, each kind in order and then signed; then the vote.

        Raises:
            ProtocolError, StreamClosedError, RoundAborted: nothing more comes; the caller tells the futures.
        """
        counts, position, body, clock = self.counts, 0, memoryview(b""), asyncio.get_running_loop().time
        while not (counts[Kind.SEAL_SENT] and counts[Kind.SEAL_REDUCED]):
            kind, length = await self._next(stream)
            began = clock()
            if kind is Kind.REDUCED:
                body = body or self._lend(sum(self._reduced_sizes))  # not before: the last round's may still be in use
                await stream.receive_body(body[position : position + length])
                position += length
                self.lengths.append(length)
            else:
                content = blank(length)
                await stream.receive_body(content)
                self._deliver(kind, content, body[:position])
            if length >= MEASURED_BYTES:
                self._measured_bytes += length
                self._measured_s += clock() - began
            counts[kind] += 1
        await self._fill_vote(stream)

    @property
    def bytes_s(self) -> float:
        """Receive rate, measured within large frames only; 0 as long as none has come."""
        return self._measured_bytes / max(self._measured_s, 1e-3)  # a clock's grain, and no division by zero

    def _deliver(self, kind: Kind, content: memoryview, body: memoryview) -> None:
        if kind is Kind.CONTRIBUTION:
            deliver(self.contributed[self.counts[kind]], content)
        elif kind is Kind.SEAL_SENT:
            deliver(self.sent, Seal.parse(content))
        else:
            deliver(self.reduced, body)
            deliver(self.signed, ReducedSeal.parse(content))

    async def _next(self, stream: FrameStream) -> tuple[Kind, int]:
        """The next frame's kind and length, which is exactly what it must be, or at most."""
        expected = {Kind.ABORT: MAX_MESSAGE_BYTES}
        for kind, seal, size, sizes in (
            (Kind.CONTRIBUTION, Kind.SEAL_SENT, SEAL_BYTES, self._contributed_sizes),
            (Kind.REDUCED, Kind.SEAL_REDUCED, REDUCED_SEAL_BYTES, self._reduced_sizes),
        ):
            if self.counts[kind] < len(sizes):
                expected[kind] = sizes[self.counts[kind]]
            elif not self.counts[seal]:
                expected[seal] = size
        kind, length = await stream.receive_header(expected)
        if kind is Kind.ABORT:
            raise await _aborted_by(stream, length)
        if length != expected[kind] and (self._exact or kind is not Kind.REDUCED):
            raise ProtocolError(f"{stream.remote} sent {length} bytes of {kind.name}; must be {expected[kind]}")
        return kind, length

    async def _fill_vote(self, stream: FrameStream) -> None:
        kind, length = await stream.receive_header({Kind.VOTE: MAX_MESSAGE_BYTES, Kind.ABORT: MAX_MESSAGE_BYTES})
        if kind is Kind.ABORT:
            raise await _aborted_by(stream, length)
        vote = bytearray(length)
        await stream.receive_body(memoryview(vote))
        deliver(self.vote, parse_json(VoteMessage, bytes(vote)))

    def has(self, stage: Stage) -> bool:
        """Whether all that the member sends at a stage of an exchange has come."""
        if stage == "contribution":
            return has_come(self.sent) and all(map(has_come, self.contributed))
        return has_come(self.signed if stage == "reduced" else self.vote)

    def fail(self, abort: RoundAborted) -> None:
        """Nothing more comes."""
        fail(abort, self.join, *self.contributed, self.sent, self.reduced, self.signed, self.vote)

    def close(self, abort: RoundAborted) -> None:
        """Drop what has arrived, and what may still be in flight."""
        self.fail(abort)
        loop = asyncio.get_running_loop()
        self.contributed, self.reduced = [loop.create_future() for _ in self._contributed_sizes], loop.create_future()
        fail(abort, *self.contributed, self.reduced)


class OwnFrames:
    """What this peer sends to all in one round: futures that a sender to each member waits for.

    Attributes:
        reduced: one for each slice of what it reduced, to send as soon as it is there.
        leaves: digests of those slices, where a peer binds itself to them before it sends them.
        seal: its signature over those, once all are there.
        vote: what is sent last.
    """

    def __init__(self, slices: int) -> None:
        loop = asyncio.get_running_loop()
        self.reduced: list[asyncio.Future[memoryview]] = [loop.create_future() for _ in range(slices)]
        self.leaves: asyncio.Future[Leaves] = loop.create_future()
        self.seal: asyncio.Future[ReducedSeal] = loop.create_future()
        self.vote: asyncio.Future[VoteMessage] = loop.create_future()

    def cancel(self) -> None:
        """Nothing more is sent, and what was is free."""
        futures: tuple[asyncio.Future[Any], ...] = (*self.reduced, self.leaves, self.seal, self.vote)
        for future in futures:
            future.cancel()
        self.reduced = []


class RoundBuffers:
    """One round of one group, from the first member that is ready to the certificate.

    Args:
        order: peer ids in roster order.
        me: this peer's place in it.
        wire: of what each member sends to one other, and to all.
        lend: memory for frames that all members receive.

    Attributes:
        sitting: what all signatures of the round name; known with the group.
        joins: the sealed joins of a persistent group's round, this peer's own among them.
        heard: what the other reducers signed, checked.
        senders: a task for each other member, which sends it everything in order.
        group: known when all have joined.
        deadline: of the exchange; infinite until it begins.
        slow_line_s: of that, for the slowest line among the members.
        times: when what the members send was there.
        ready: this peer has joined it.
        ahead: the members that have made this round already.
        overtaken: fails once they call this peer late for the next one soon.
        useless: (stage, member) that sent nothing of use, although it sent all.
        waited: what made the exchange long for this peer.
    """

    def __init__(
        self, order: tuple[str, ...], me: int, wire: WireFormat, group: Group | None = None, lend: Lend = blank
    ) -> None:
        self.order, self.me, self.wire, self.lend = order, me, wire, lend
        self.group: Group | None = None
        sizes = [self.broadcast_bytes(index) for index in range(len(order))]
        self.inboxes = {
            peer_id: Inbox(wire.contributed_bytes(len(order), me), own, lend, exact=wire.exact)
            for index, (peer_id, own) in enumerate(zip(order, sizes, strict=True))
            if index != me
        }
        self.outbound: dict[str, FrameStream] = {}
        self.own = OwnFrames(len(sizes[me]))
        self.sitting: asyncio.Future[Sitting] = asyncio.get_running_loop().create_future()
        self.joins: dict[str, bytes] = {}
        self.heard: ReducedShards | None = None
        self.senders: dict[str, asyncio.Task[None]] = {}
        self.wire_bytes = sum(map(sum, sizes))
        self.deadline, self.slow_line_s, self.waited = float("inf"), 0.0, Waited()
        self.times, self.useless = Arrivals(), set[tuple[Stage, str]]()
        self.ready = False
        self.ahead, self.overtaken = frozenset[str](), asyncio.get_running_loop().create_future()
        if group is not None:
            self.seat(group)

    def seat(self, group: Group) -> None:
        """All have joined: the round is that of this group."""
        self.group = group
        self.sitting.set_result(sitting_of(group))

    @property
    def share(self) -> int:
        """This peer's own; 0 where all members do the same."""
        return self.wire.share(self.me)

    def slices(self, index: int) -> Sequence[tuple[int, int]]:
        """The slices that are sent to that member alone, in elements."""
        return self.wire.slices(len(self.order), index)

    def broadcast_bytes(self, index: int) -> list[int]:
        """Bytes of each slice that that member sends to all, or the most."""
        return self.wire.broadcast_bytes(len(self.order), index)

    def fail(self, peer_id: str, abort: RoundAborted) -> None:
        """Nothing more comes from this member."""
        self.inboxes[peer_id].fail(abort)

    def fail_joins(self, abort: RoundAborted) -> None:
        """Fail the joins that have not arrived."""
        fail(abort, *(inbox.join for inbox in self.inboxes.values()))

    def lack(self, now: float = math.inf) -> Lack | None:
        """The first stage of which something that is of use has not come, and of which members. Where the stage before
        came after half of its time and several lack this one: the stage before, and those that were late.

        Args:
            now: None within the first half of a stage's time.
        """
        before, start = Lack(STAGES[0], frozenset()), self.times.began
        for stage in STAGES:
            half = start + (self.deadline - start) / 2
            missing = frozenset(peer_id for peer_id in self.inboxes if not self._has(stage, peer_id))
            if missing and now < half:
                return None
            if missing:
                return before if before.names and len(missing) > 1 else Lack(stage, missing)
            times = {peer_id: self.times.came[stage].get(peer_id, start) for peer_id in self.inboxes}
            before = Lack(stage, frozenset(peer_id for peer_id, at in times.items() if at > half))
            start = max([start, *times.values()])
        return None

    def over(self, now: float) -> bool:
        """Whether its deadline has passed; not where others have ended it."""
        return not self.overtaken.done() and now >= self.times.began + OVER * (self.deadline - self.times.began)

    def lacks(self, stage: Stage) -> bool:
        """Whether something of a stage has not come, or is of no use."""
        return not all(self._has(stage, peer_id) for peer_id in self.inboxes)

    def lack_of(self, peer_id: str) -> Lack | None:
        """The first stage of which nothing that is of use has come from this member."""
        missing = (stage for stage in STAGES if peer_id in self.inboxes and not self._has(stage, peer_id))
        return next((Lack(stage, frozenset({peer_id})) for stage in missing), None)

    def _has(self, stage: Stage, peer_id: str) -> bool:
        return self.inboxes[peer_id].has(stage) and (stage, peer_id) not in self.useless

    def too_short(self, lack: Lack | None) -> bool:
        """Whether its deadline was, as far as this peer can tell. One of several others that is late proves nothing."""
        return lack is None or len(lack.names) > 1 or len(self.inboxes) == 1

    def note_open(self, now: float) -> None:
        """A member is ready, perhaps this one. The round is open once two are: one alone may show its join to all but
        the member that it is going to call late.
        """
        if sum(has_come(inbox.join) for inbox in self.inboxes.values()) + self.ready >= min(2, len(self.inboxes)):
            self.times.opened = min(self.times.opened, now)

    def overtake(self, now: float) -> None:
        """Others have begun the next round, and will not wait for this peer any longer."""
        self.deadline = min(self.deadline, now)
        fail(RoundAborted("exchange", "others have made this round, and wait in the next one"), self.overtaken)

    def close(self, abort: RoundAborted) -> None:
        """The round is over: free what has arrived, even if these buffers are still referenced."""
        for inbox in self.inboxes.values():
            inbox.close(abort)
        self.own.cancel()
        self.sitting.cancel()
        self.overtaken.cancel()


async def _aborted_by(stream: FrameStream, length: int) -> GaveUpError:
    body = bytearray(length)
    await stream.receive_body(memoryview(body))
    return GaveUpError(stream.remote, parse_json(AbortMessage, bytes(body)))
