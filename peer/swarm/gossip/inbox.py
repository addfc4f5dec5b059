"""What other members send to this peer in gossip rounds: one stream from each, which begins with its join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from peer.errors import ProtocolError
from peer.outer.round import RoundAborted
from peer.protocol.lineage import Position
from peer.protocol.wire import GossipJoin, GossipRoster, Kind, RejectMessage
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.futures import deliver, fail, settled

log = logging.getLogger(__name__)
MAX_WAITING = 64  # as many as a roster may name
MAX_STRANGERS = 32  # of them, whose records this peer has not seen: they may just have come
Reason = Literal["behind", "follow", "excluded"]


def round_name(run_id: str) -> str:
    """Stream handler under which members come to each other."""
    return f"atoll/{run_id[:16]}/gossip"


class GossipInbox:
    """One member that has come: futures that hold what it sends, or why that never comes.

    Attributes:
        seated: this peer has got to the round, and the member's roster is its own.
        roster: the members with which it continues.
        frames: its contribution; of one slice each.
        complete: set when it holds all that it needs: it applies the round once all others say so too.
    """

    def __init__(self, remote: str, join: GossipJoin, changed: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        self.remote, self.join, self._changed = remote, join, changed
        self.seated: asyncio.Future[Sequence[int]] = loop.create_future()
        self.roster: asyncio.Future[GossipRoster] = loop.create_future()
        self.frames: list[asyncio.Future[bytes]] = []
        self.complete: asyncio.Future[None] = loop.create_future()
        self.filling: asyncio.Task[None] | None = None
        self.lost: RoundAborted | None = None
        self.reason: Reason = "behind"

    def seat(self, sizes: Sequence[int]) -> None:
        """Read on: frames of these sizes are to come."""
        self.frames = [asyncio.get_running_loop().create_future() for _ in sizes]
        self.seated.set_result(sizes)

    def spent(self, index: int) -> None:
        """This frame is mixed: free its bytes."""
        self.frames[index] = settled(b"")

    def turn_away(self, reason: Reason = "behind") -> None:
        """This peer will not make that round with it."""
        if not self.seated.done():
            self.reason = reason
            self.seated.cancel()

    async def fill(self, stream: FrameStream, sizes: Sequence[int]) -> None:
        """Read to the end. Raises ProtocolError, StreamClosedError."""
        deliver(self.roster, await stream.receive_message(Kind.ROSTER, GossipRoster))
        self._changed.set()
        for index, size in enumerate(sizes):
            _, frame = await stream.receive({Kind.CONTRIBUTION: size}, exact=True)
            deliver(self.frames[index], frame)
        await stream.receive({Kind.END: 0}, exact=True)
        deliver(self.complete, None)

    def fail(self, abort: RoundAborted) -> None:
        """Nothing more comes."""
        self.lost = abort
        self.turn_away()
        fail(abort, self.roster, *self.frames, self.complete)
        self._changed.set()

    def end(self, abort: RoundAborted) -> None:
        """The round is over: what has come is freed, and what still comes is not read."""
        self.fail(abort)
        if self.filling is not None:
            self.filling.cancel()
        self.frames = []


class GossipHost(Protocol):
    """The peer that others come to; `GossipRounds` implements it."""

    def position(self) -> Position:
        """Its position."""

    def taking_part(self) -> bool:
        """Whether it makes rounds now."""

    def knows(self, peer_id: str) -> bool:
        """Whether a peer's record has been seen."""

    def on_join(self, join: GossipJoin, remote: str) -> None:
        """A member has come for this round."""


class GossipInboxes:
    """The members that have come, until this peer gets to the round that they came for.

    Args:
        node, run_id: the network, and the run whose members may come.

    Attributes:
        waiting: by peer id; one for each peer, its last.
        changed: set when anything has come.
    """

    def __init__(self, node: Node, run_id: str, host: GossipHost, longest_wait_s: float) -> None:
        self._node, self._run_id, self._host, self._longest_wait_s = node, run_id, host, longest_wait_s
        self.waiting: dict[str, GossipInbox] = {}
        self.changed = asyncio.Event()

    async def start(self) -> None:
        await self._node.serve(round_name(self._run_id), "round", self._on_stream)

    def moved(self, round: int) -> None:
        """This peer makes no round up to this one any more: reject members that wait for it at an earlier one."""
        for inbox in list(self.waiting.values()):
            if inbox.join.round <= round:
                inbox.turn_away()

    async def _on_stream(self, stream: FrameStream) -> None:
        join = await stream.receive_message(Kind.JOIN, GossipJoin, self._node.timing.first_frame_s)
        remote = stream.remote
        limit = MAX_WAITING if self._host.knows(remote) else MAX_STRANGERS
        if remote not in self.waiting and len(self.waiting) >= limit:
            await self._turn_away(stream, "excluded")
            return
        if join.run_id != self._run_id or remote not in join.roster or self._node.peer_id not in join.roster:
            raise ProtocolError(f"{remote} comes to a round that is not of this peer and itself")
        if join.round <= self._host.position().round or not self._host.taking_part():
            await self._turn_away(stream, "behind" if self._host.taking_part() else "excluded")
            return
        inbox, before = GossipInbox(remote, join, self.changed), self.waiting.get(remote)
        self.waiting[remote] = inbox
        if before is not None:
            before.turn_away()
        self.changed.set()
        self._host.on_join(join, remote)
        try:
            sizes = await asyncio.wait_for(asyncio.shield(inbox.seated), self._longest_wait_s)
            self._forget(inbox)
            inbox.filling = asyncio.ensure_future(inbox.fill(stream, sizes))
            await asyncio.wait({inbox.filling})
            if not inbox.filling.cancelled():
                inbox.filling.result()
        except asyncio.CancelledError:
            if inbox.filling is not None:
                inbox.filling.cancel()
            if not inbox.seated.cancelled():
                raise
            await self._turn_away(stream, inbox.reason)
        except (ProtocolError, StreamClosedError) as error:
            inbox.fail(RoundAborted("exchange", str(error), remote))
            raise
        finally:
            self._forget(inbox)

    def _forget(self, inbox: GossipInbox) -> None:
        if self.waiting.get(inbox.remote) is inbox:
            del self.waiting[inbox.remote]

    async def _turn_away(self, stream: FrameStream, reason: Reason) -> None:
        position = self._host.position()
        message = RejectMessage(reason=reason, round=position.round, lineage_id=position.lineage_id)
        await stream.send_message(Kind.REJECT, message, self._node.timing.first_frame_s)
