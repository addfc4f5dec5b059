"""A group that stays: its streams outlive the round, so that the next one needs no matchmaking.

Every member has opened one stream to every other. On it go, round after round: the sealed join (but for the first
round, whose roster a leader has told), slices of the contribution and of the mean as they are ready, the vote. The
group ends for all members when one stream ends: a member left, died, broke the protocol, or wants to admit others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Protocol

from peer.errors import ProtocolError
from peer.outer.round import RoundAborted
from peer.protocol.lineage import Position
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_JOIN_BYTES, MAX_MESSAGE_BYTES, AbortMessage, JoinMessage, Kind
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.round.giving_up import GaveUpError, Lack
from peer.swarm.round.inbox import Inbox, RoundBuffers
from peer.swarm.runtime.timing import Timing

log = logging.getLogger(__name__)
OpenJoin = Callable[[bytes, str, Position], JoinMessage]


class GroupOwner(Protocol):
    """What has a group; an `Exchange`."""

    def on_join(self) -> None:
        """A member is ready for the next round, and this peer was not first."""

    def on_ahead(self, persistent: PersistentGroup, remote: str) -> None:
        """A member joins the next round, while this peer is still in the one before."""

    def on_break(self, persistent: PersistentGroup) -> None:
        """This group cannot continue; called once, at once."""

    def on_words(self, persistent: PersistentGroup, remote: str, message: AbortMessage) -> None:
        """A member gives up, and says why."""

    def on_offence(self, abort: RoundAborted) -> None:
        """A member has broken the protocol on its stream."""


class PersistentGroup:
    """The streams of one group and the round that runs on them.

    Args:
        identifier: the id of its roster; streams name it when they are opened.
        open_join: opens and checks the join of a member for the round at a position.

    Attributes:
        position: of the group; None until its first round is applied.
        broken: why it ends: with the round that runs, if one does.
        left_at: when this peer left it, by the loop's clock; infinite before.
    """

    def __init__(
        self,
        first: RoundBuffers,
        identifier: str,
        open_join: OpenJoin,
        owner: GroupOwner,
        timing: Timing,
    ) -> None:
        self.buffers, self.identifier, self._timing = first, identifier, timing
        self.position: Position | None = None
        self.members = frozenset(first.order)
        self.broken: RoundAborted | None = None
        self.left_at = math.inf
        self.outbound: dict[str, FrameStream] = {}
        self._open_join, self._owner = open_join, owner
        self._inbound: dict[str, FrameStream] = {}
        self._advances = 0
        self._moved = asyncio.Event()

    @property
    def leader(self) -> str:
        """Whose roster made this group, while its first round runs; then empty."""
        group = self.buffers.group
        return group.leader if group is not None and self.position is None else ""

    async def follow(self, stream: FrameStream) -> None:
        """Read what a member sends, until the group ends."""
        remote = stream.remote
        if remote in self._inbound or remote not in self.buffers.inboxes:
            raise ProtocolError(f"{remote} speaks for group {self.identifier[:12]}, which it is not expected in")
        self._inbound[remote] = stream
        inbox: Inbox | None = self.buffers.inboxes[remote]
        advances = self._advances
        try:
            while True:
                assert inbox is not None
                await inbox.fill(stream)
                inbox = None  # all that a round has brought is free once it is applied
                advances, inbox = await self._next(stream, advances)
        except (ProtocolError, StreamClosedError) as error:
            abort = RoundAborted("exchange", str(error), culprit=remote)
            if isinstance(error, ProtocolError):
                self._owner.on_offence(abort)
            self._fail(inbox, remote, abort)
        except RoundAborted as abort:
            try:
                if isinstance(abort, GaveUpError) and abort.remote == remote:
                    self.hear(remote, abort.message)
            finally:
                self._fail(inbox, remote, abort)

    def follows(self, remote: str) -> bool:
        """Whether this member has opened its stream already."""
        return remote in self._inbound

    def hear(self, remote: str, message: AbortMessage) -> None:
        """A member gives up, and says why."""
        self._owner.on_words(self, remote, message)

    def ended_by(self, remote: str, message: AbortMessage) -> None:
        """A member gives up, and says so on another stream: no word counts in a group that continues."""
        try:
            self.hear(remote, message)
        finally:
            if self.broken is None:
                self._fail(self.buffers.inboxes.get(remote), remote, GaveUpError(remote, message))

    async def _next(self, stream: FrameStream, before: int) -> tuple[int, Inbox]:
        """The round that a member's next join is for, once this peer has got there too: its number, its inbox."""
        kind, sealed = await stream.receive({Kind.JOIN: MAX_JOIN_BYTES, Kind.ABORT: MAX_MESSAGE_BYTES})
        if kind is not Kind.JOIN:
            message = parse_json(AbortMessage, sealed)
            if Lack.said(message.word):
                raise GaveUpError(stream.remote, message)
            raise RoundAborted("match", f"{stream.remote} left the group", culprit=stream.remote)
        if self._advances == before and self.broken is None:
            self._owner.on_ahead(self, stream.remote)
        while self._advances == before and self.broken is None:
            await self._moved.wait()
        if self.broken is not None or self.position is None:
            await self._last_words(stream)
            raise self.broken or RoundAborted("match", "the group does not stay")
        join = self._open_join(sealed, stream.remote, self.position)
        if (join.round, join.parent) != (self.position.round, self.position.lineage_id):
            raise ProtocolError(f"{stream.remote} joins round {join.round}; the group is at {self.position.round}")
        inbox = self.buffers.inboxes[stream.remote]
        if not inbox.join.done():
            inbox.join.set_result((sealed, join))
        self._owner.on_join()
        return self._advances, inbox

    async def _last_words(self, stream: FrameStream) -> None:
        """What a member says that has joined the next round, behind what it has sent for that; this peer ends the
        one before.
        """
        longest = dict.fromkeys(Kind, max(MAX_MESSAGE_BYTES, self.buffers.wire_bytes))
        with contextlib.suppress(StreamClosedError, ProtocolError):
            async with stream.within(self._timing.stall_words_s, "said nothing"):
                kind = None
                while kind is not Kind.ABORT:
                    kind, body = await stream.receive(longest)
            self.hear(stream.remote, parse_json(AbortMessage, body))

    def advance(self, buffers: RoundBuffers, position: Position) -> None:
        """This peer has applied the round: the next one may begin."""
        self.buffers, self.position = buffers, position
        self._advances += 1
        self._wake()

    def give_up(self, abort: RoundAborted) -> None:
        """The group ends with this round: its members join no other."""
        if self.broken is not None:
            return
        log.info("the group ends: %s", abort.reason)
        self.broken = abort
        self.buffers.fail_joins(abort)
        self._owner.on_break(self)

    def _fail(self, inbox: Inbox | None, remote: str, abort: RoundAborted) -> None:
        if inbox is not None:
            inbox.fail(abort)
        self.buffers.fail(remote, abort)
        self.give_up(abort)
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def end(self, abort: RoundAborted) -> None:
        """End the group at once: no member waits for it any longer."""
        self.broken = self.broken or abort
        self.leave()
        self.buffers.close(abort)
        self._wake()
        for stream in self._inbound.values():  # they end with the other side, unless it breaks the protocol
            asyncio.get_running_loop().call_later(self._timing.finish_timeout_s, stream.close)

    def leave(self) -> None:
        """This peer waits for nothing more in it."""
        self.left_at = min(self.left_at, asyncio.get_running_loop().time())

    async def tell(self, message: AbortMessage) -> list[str]:
        """Tell the others that this peer gives up, where a stream is not in the middle of a frame. -> the others."""
        free = [stream for stream in self.outbound.values() if not stream.sending]
        busy = [peer_id for peer_id, stream in self.outbound.items() if stream.sending]
        for peer_id in busy:
            self.outbound[peer_id].close()
        sends = (stream.send_message(Kind.ABORT, message, self._timing.abort_timeout_s) for stream in free)
        await asyncio.gather(*sends, return_exceptions=True)
        return busy


async def abort_stream(stream: FrameStream, message: AbortMessage, timing: Timing) -> None:
    """Say on a stream to a member that nothing more comes, behind all that was said; the other end closes it then."""
    if not stream.sending:
        with contextlib.suppress(StreamClosedError):
            await stream.send_message(Kind.ABORT, message, timing.abort_timeout_s)
            await stream.finish(timing.finish_timeout_s)
    stream.close()
