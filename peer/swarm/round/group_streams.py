"""The streams between members of a group: how one that a member opens begins, and which group an inbound one is for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

from peer.errors import ProtocolError
from peer.outer.round import Group, RoundAborted
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, AbortMessage, HelloMessage, Kind
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.round.giving_up import no_roster
from peer.swarm.round.group_words import GroupWords
from peer.swarm.round.persistent_group import PersistentGroup, abort_stream
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.expiring import BoundedMap

EARLY_STREAMS = 64
EARLY_STREAMS_OF_ONE = 2
EARLY_STREAMS_OF_STRANGERS = 256  # one of each: also newcomers come early
DECLINED_KEPT = ENDED_KEPT = 16
TOLD_KEPT = 1024


class GroupStreams:
    """Opens streams to members, and leads theirs to the group that they speak for.

    Args:
        persistent: -> the group that this peer is in now.
    """

    def __init__(
        self, node: Node, run_id: str, words: GroupWords, persistent: Callable[[], PersistentGroup | None]
    ) -> None:
        self._node, self._words, self._group = node, words, persistent
        self._name = f"atoll/{run_id[:16]}/round"
        self._changed = asyncio.Condition()
        strangers = Admission(EARLY_STREAMS_OF_STRANGERS, per_peer=1)
        self._early = {True: strangers, False: Admission(EARLY_STREAMS, EARLY_STREAMS_OF_ONE)}
        self._declined: deque[str] = deque(maxlen=DECLINED_KEPT)
        self._expected: deque[str] = deque(maxlen=DECLINED_KEPT)
        self._told: BoundedMap[tuple[str, str], None] = BoundedMap(TOLD_KEPT)  # (group, peer): no roster of it is here
        self._ended: BoundedMap[str, tuple[set[str], RoundAborted]] = BoundedMap(ENDED_KEPT)
        self._judged: WeakValueDictionary[str, PersistentGroup] = WeakValueDictionary()  # until it is settled

    async def start(self) -> None:
        await self._node.serve(self._name, "round", self._on_stream)

    async def changed(self) -> None:
        """This peer's group changed: streams that were early for it need not wait any longer."""
        async with self._changed:
            self._changed.notify_all()

    async def stream_to(self, persistent: PersistentGroup, peer_id: str) -> FrameStream:
        """The group's stream to a member; opened when there is none. Raises StreamClosedError."""
        stream = persistent.outbound.get(peer_id)
        if stream is None:
            stream = await self._node.open(peer_id, self._name, "round", bulk=True)
            persistent.outbound[peer_id] = stream
            await stream.send_message(Kind.HELLO, HelloMessage(group_id=persistent.identifier))
        return stream

    def expect(self, group: Group) -> None:
        """This peer has the roster of a group, and will soon begin its round."""
        self._expected.append(group.id)

    def gave_up(self, group: Group) -> bool:
        """Whether this peer has told members of this group, other than its leader, that it has no roster of it."""
        return any((group.id, peer_id) in self._told for peer_id in group.others if peer_id != group.leader)

    def decline(self, group: Group, abort: RoundAborted) -> None:
        """Tell the members of a group that has formed that this peer does not begin its round."""
        self._declined.append(group.id)
        self._node.spawn(self.changed())
        for peer_id in group.others:
            self._node.spawn(self.say(peer_id, group.id, abort))

    def ended(self, persistent: PersistentGroup, abort: RoundAborted) -> None:
        """A member that connects after the group ended was suspended while holding an old roster: tell it once, so that
        it joins the others. Otherwise it would wait for them until its deadline.
        """
        why = RoundAborted(abort.phase, abort.reason, abort.culprit)  # without the frames that the exception holds
        self._ended[persistent.identifier] = set(persistent.members), why
        self._judged[persistent.identifier] = persistent
        self._node.spawn(self.changed())

    async def say(self, peer_id: str, group_id: str, abort: RoundAborted) -> None:
        """Tell a member on a stream of its own why this peer is in a round of that group no longer."""
        message = self._words.message(group_id, abort)  # now: a word that is forgotten meanwhile would be another one
        with contextlib.suppress(StreamClosedError):
            stream = await self._node.open(peer_id, self._name, "round", self._node.timing.first_frame_s)
            try:
                await stream.send_message(Kind.HELLO, HelloMessage(group_id=group_id))
                await abort_stream(stream, message, self._node.timing)
            finally:
                stream.close()

    async def _say_unknown(self, group_id: str, remote: str) -> None:
        """Tell a peer once that this one has no roster of its group: a leader may have withheld it from this one."""
        if (group_id, remote) not in self._told:
            self._told[group_id, remote] = None
            await self.say(remote, group_id, no_roster(remote))

    async def _on_stream(self, stream: FrameStream) -> None:
        hello = await stream.receive_message(Kind.HELLO, HelloMessage, self._node.timing.first_frame_s)
        persistent = await self._group_of(hello.group_id, stream.remote)
        if persistent is None and hello.group_id in self._declined:
            return  # the refusal is under way; it has not arrived yet
        if persistent is None and (known := self._ended.get(hello.group_id)) is not None:
            members, why = known
            if stream.remote in members:
                members.remove(stream.remote)
                self._node.spawn(self.say(stream.remote, hello.group_id, why))
                await self._last_words(hello.group_id, stream)
                return
        if persistent is None:
            await self._say_unknown(hello.group_id, stream.remote)
            raise ProtocolError(f"{stream.remote} speaks for group {hello.group_id[:12]}, which it is not expected in")
        if persistent.follows(stream.remote):  # its first one has ended in the middle of a frame
            await self._last_words(hello.group_id, stream)
            return
        await persistent.follow(stream)

    async def _last_words(self, group_id: str, stream: FrameStream) -> None:
        """Why a member gives up a round that this peer has given up already, if that is what it says."""
        timeout_s = self._node.timing.first_frame_s
        with contextlib.suppress(StreamClosedError, ProtocolError):
            async with stream.within(timeout_s, "said nothing"):
                _, body = await stream.receive({Kind.ABORT: MAX_MESSAGE_BYTES})
            message, persistent = parse_json(AbortMessage, body), self._group()
            if persistent is not None and persistent.identifier == group_id:
                persistent.ended_by(stream.remote, message)
            elif (ended := self._judged.get(group_id)) is not None:
                ended.hear(stream.remote, message)

    async def _group_of(self, identifier: str, remote: str) -> PersistentGroup | None:
        """The group with this id; a stream may arrive a little before this member's own roster does."""

        def known() -> PersistentGroup | None:
            persistent = self._group()
            return persistent if persistent is not None and persistent.identifier == identifier else None

        def settled() -> bool:
            return known() is not None or identifier in self._declined or identifier in self._ended

        if not settled():
            places = self._early[self._node.strange(remote)]
            expected = identifier in self._expected
            with contextlib.nullcontext(True) if expected else places.of(remote) as admitted:
                if not admitted:
                    raise ProtocolError(f"too many streams wait for unknown groups: {places.usage(remote)}")
                for timeout_s in (self._node.timing.late_roster_s, self._node.timing.first_frame_s):
                    with contextlib.suppress(TimeoutError):
                        async with self._changed:
                            await asyncio.wait_for(self._changed.wait_for(settled), timeout_s)
                    if settled() or identifier not in self._expected:
                        break
        return known()
