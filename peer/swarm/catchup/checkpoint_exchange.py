"""How nodes hear of the newest checkpoint: from each other over authenticated streams, and through the DHT."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from peer.errors import ProtocolError, in_words
from peer.protocol.checkpoints import Checkpoint
from peer.protocol.records import CHECKPOINT_TTL_S, MAX_RECORD_BYTES, checkpoints_key
from peer.protocol.wire import Kind
from peer.swarm.catchup.chain_scout import ChainScout
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.net.directory import read_records, write_record
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError

log = logging.getLogger(__name__)


class CheckpointExchange:
    """Keeps a node's `NewestCheckpoint` new, and gives it to others."""

    def __init__(self, node: Node, run_id: str, checkpoints: NewestCheckpoint) -> None:
        self._node, self._run_id, self._checkpoints = node, run_id, checkpoints
        self._name = f"atoll/{run_id[:16]}/checkpoint"

    async def start(self) -> None:
        await self._node.serve(self._name, "history", self._answer)
        self._node.spawn(self._share_forever())

    async def _answer(self, stream: FrameStream) -> None:
        async with asyncio.timeout(self._node.timing.checkpoint_answer_s):
            if self._checkpoints.sealed is not None:
                await stream.send(Kind.DATA, self._checkpoints.sealed)
            await stream.send(Kind.END)

    async def ask(self, peer_id: str) -> None:
        """Take the newest checkpoint that a peer knows.

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
            self._checkpoints.offer(bytes(body))

    async def introduce(self, introducers: Iterable[str], scout: ChainScout) -> None:
        """Before a newcomer starts: hear of the newest checkpoint, or else where its introducers stand."""
        await self._read()
        for peer_id in introducers:
            try:
                await self.ask(peer_id)
                if self._checkpoints.newest is None:
                    chain = await scout.look(peer_id, 0)
                    self._checkpoints.introduced = Checkpoint(
                        run_id=self._run_id, round=len(chain), lineage_id=chain[-1].link.id, serial=0, signed_at=0.0
                    )
            except (TimeoutError, ProtocolError, StreamClosedError) as error:
                log.info("%s has no checkpoint, and shows no chain: %s", peer_id, in_words(error))
            else:
                return

    async def _share_forever(self) -> None:
        written_at, written = float("-inf"), None
        while True:
            await self._read()
            sealed, now = self._checkpoints.sealed, self._node.clock()
            if sealed is not None and (sealed != written or now >= written_at + self._node.timing.manifest_period_s):
                signer = sealed[1 : 1 + sealed[0]].decode()
                expires_at = time.time() + CHECKPOINT_TTL_S
                await write_record(self._node, checkpoints_key(self._run_id), sealed, expires_at, owner=signer)
                written_at, written = now, sealed
            await asyncio.sleep(self._node.timing.checkpoint_period_s)

    async def _read(self) -> None:
        for owner, blob in (await read_records(self._node, checkpoints_key(self._run_id)) or {}).items():
            try:
                self._checkpoints.offer(blob)
            except ProtocolError as error:
                log.warning("ignoring a checkpoint under %s: %s", owner, error)
