"""How nodes hear of the newest record of a kind: from each other over authenticated streams, and through the DHT."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Protocol

from peer.errors import ProtocolError, in_words
from peer.protocol.control import control_key
from peer.protocol.records import MAX_RECORD_BYTES, SHARED_TTL_S, signer_of
from peer.protocol.wire import Kind
from peer.swarm.net.directory import read_records, write_record
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError

log = logging.getLogger(__name__)


class HeldRecord(Protocol):
    """The newest signed record of a kind that this node has seen."""

    @property
    def sealed(self) -> bytes | None: ...

    def offer(self, blob: bytes) -> bool:
        """Take a record that is newer; True if it was. Raises ProtocolError if it is not acceptable."""


class RecordExchange:
    """Keeps a node's newest record of a kind new, and gives it to others.

    Args:
        name: of its stream handler.
        key: of the DHT.
        period_s: between two reads of the DHT.
    """

    def __init__(self, node: Node, name: str, key: str, held: HeldRecord, period_s: float) -> None:
        self._node, self._name, self._key, self._held, self._period_s = node, name, key, held, period_s

    async def start(self) -> None:
        await self._node.serve(self._name, "history", self._answer)
        self._node.spawn(self._share_forever())

    async def _answer(self, stream: FrameStream) -> None:
        async with asyncio.timeout(self._node.timing.checkpoint_answer_s):
            if self._held.sealed is not None:
                await stream.send(Kind.DATA, self._held.sealed)
            await stream.send(Kind.END)

    async def ask(self, peer_id: str) -> None:
        """Take the newest record that a peer knows.

        Raises:
            ProtocolError: it is none of this run.
            StreamClosedError, TimeoutError: the peer does not answer.
        """
        stream = await self._node.open(peer_id, self._name, "history")
        try:
            async with asyncio.timeout(self._node.timing.checkpoint_answer_s):
                kind, body = await stream.receive({Kind.DATA: MAX_RECORD_BYTES, Kind.END: 0})
        finally:
            stream.close()
        if kind is Kind.DATA:
            self._held.offer(bytes(body))

    async def read(self) -> None:
        """Take what is in the DHT."""
        for owner, blob in (await read_records(self._node, self._key) or {}).items():
            try:
                self._held.offer(blob)
            except ProtocolError as error:
                log.warning("ignoring a record under %s, %s: %s", self._key, owner, error)

    async def hear(self, introducers: Iterable[str]) -> None:
        """Before a newcomer starts: take the newest that the DHT holds and that its introducers know."""
        await self.read()
        for peer_id in introducers:
            try:
                await self.ask(peer_id)
            except (TimeoutError, ProtocolError, StreamClosedError) as error:
                log.info("%s shows no record %s: %s", peer_id, self._name, in_words(error))

    async def _share_forever(self) -> None:
        written_at, written = float("-inf"), None
        while True:
            await self.read()
            sealed, now = self._held.sealed, self._node.clock()
            if sealed is not None and (sealed != written or now >= written_at + self._node.timing.manifest_period_s):
                expires_at = time.time() + SHARED_TTL_S
                await write_record(self._node, self._key, sealed, expires_at, owner=signer_of(sealed))
                written_at, written = now, sealed
            await asyncio.sleep(self._period_s)


def control_exchange(node: Node, run_id: str, control: HeldRecord) -> RecordExchange:
    """That of the organiser's control records."""
    name, period_s = f"atoll/{run_id[:16]}/control", node.timing.control_period_s
    return RecordExchange(node, name, control_key(run_id), control, period_s)
