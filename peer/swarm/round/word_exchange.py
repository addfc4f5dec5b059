"""After a failed round the members show each other what they have heard: one may have said another thing to each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from peer.errors import ProtocolError
from peer.protocol.evidence import TwoWords
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import MAX_WORDS_BYTES, HeardWords, Kind
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.round.giving_up import Lack
from peer.swarm.round.group_words import GROUPS_KEPT, GroupWords
from peer.swarm.round.persistent_group import PersistentGroup
from peer.swarm.runtime.expiring import BoundedMap


class WordExchange:
    """Shows the words of each group once its round is judged, so that each word that counted is among them.

    Args:
        found: called with each proof that a member has said two things.
        learned: called with a group, a member whose word has not come to this peer itself, and what it lacks.
    """

    def __init__(
        self, node: Node, run_id: str, words: GroupWords, found: Callable[[TwoWords], None],
        learned: Callable[[str, str, Lack], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._node, self._words, self._found, self._learned = node, words, found, learned
        self._name = f"atoll/{run_id[:16]}/words"
        self._begun: BoundedMap[str, None] = BoundedMap(GROUPS_KEPT)

    async def start(self) -> None:
        await self._node.serve(self._name, "round", self._on_stream)

    def begin(self, persistent: PersistentGroup) -> None:
        """A word has come in this group."""
        if persistent.identifier not in self._begun:
            self._begun[persistent.identifier] = None
            self._node.spawn(self._show(persistent))

    async def _show(self, persistent: PersistentGroup) -> None:
        timing, loop = self._node.timing, asyncio.get_running_loop()
        closed_s = timing.stall_words_s + 2 * timing.late_roster_s
        while (left_s := persistent.left_at + closed_s - loop.time()) > 0.0:
            await asyncio.sleep(min(left_s, closed_s))
        message = self._words.shown(persistent.identifier)
        others = persistent.members - {self._node.peer_id}
        if message is not None:
            await asyncio.gather(*(self._say(peer_id, dump_json(message)) for peer_id in sorted(others)))

    async def _say(self, peer_id: str, message: bytes) -> None:
        with contextlib.suppress(StreamClosedError):
            stream = await self._node.open(peer_id, self._name, "round", self._node.timing.first_frame_s)
            try:
                await stream.send(Kind.WORDS, message, timeout_s=self._node.timing.first_frame_s)
                await stream.finish(self._node.timing.finish_timeout_s)
            finally:
                stream.close()

    async def _on_stream(self, stream: FrameStream) -> None:
        if not self._words.awaits(stream.remote):
            raise ProtocolError(f"{stream.remote} shows words, and was in no group of which some were heard")
        _, body = await stream.receive({Kind.WORDS: MAX_WORDS_BYTES}, timeout_s=self._node.timing.first_frame_s)
        try:
            message = parse_json(HeardWords, body)
        except ProtocolError:
            self._words.await_no_more(stream.remote)
            raise
        learned, found = self._words.compare(stream.remote, message)
        for member, lack in learned.items():
            self._learned(message.group, member, lack)
        for finding in found:
            self._found(finding)
