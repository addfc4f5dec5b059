"""A donor: serves the chain, updates, chunks of snapshots and the tokenizer's files to any peer, within quotas."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from peer.errors import ProtocolError
from peer.protocol.records import dump_json
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm.catchup.readers import Reader, Readers
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_cache import Snapshots
from peer.swarm.state.snapshot_file import SnapshotFile
from peer.tokenizer_files import TokenizerFiles

READERS = 16
READERS_PER_PEER = 4
BULK_READERS_PER_PEER = 2
BULK_READERS = {True: 8, False: 4}
"""Of chunks and files: strangers, among them all newcomers, and peers that were in a round."""
FRAME_BYTES = 1 << 20


def history_name(run_id: str) -> str:
    """Stream handler under which history is served."""
    return f"atoll/{run_id[:16]}/history"


class HistoryServer:
    """Serves a `ChainStore` and snapshots.

    Args:
        priority: asked for a turn before each chunk.
        on_return: called with a peer that asks for the rounds after one that it was in: it was away, and is back.
        files: of the run's tokenizer; None: there are none.
    """

    def __init__(
        self, node: Node, run_id: str, history: ChainStore, snapshots: Snapshots, priority: RoundPriority | None = None,
        on_return: Callable[[str], None] = lambda _: None, files: TokenizerFiles | None = None,
    ) -> None:  # fmt: skip
        self._priority, self._on_return = priority or RoundPriority(node.timing, node.clock), on_return
        self._node, self._run_id, self._history, self._snapshots = node, run_id, history, snapshots
        self._files = files
        # separate: a peer that downloads a snapshot asks for the chain meanwhile
        timing, clock = node.timing, node.clock
        self._readers = {
            (what, strange): Readers(READERS, READERS_PER_PEER, timing, clock)
            for what in ("state", "chain", "update", "snapshot") for strange in (True, False)
        } | {
            (what, strange): Readers(BULK_READERS[strange], BULK_READERS_PER_PEER, timing, clock, bulk=True)
            for what in ("chunks", "file") for strange in (True, False)
        }  # fmt: skip

    async def start(self) -> None:
        await self._node.serve(history_name(self._run_id), "history", self._on_stream)

    async def _on_stream(self, stream: FrameStream) -> None:
        request = await self._request(stream)
        with self._readers[request.what, self._node.strange(stream.remote)].of(stream) as reader:
            if reader is None:
                await stream.send(Kind.BUSY, timeout_s=self._node.timing.frame_timeout_s)
                return
            if request.what == "chunks":
                await self._serve_chunks(reader, request)
                return
            if request.what == "chain":
                if 0 < request.from_round < len(self._history.chain) and self._history.seen[stream.remote]:
                    self._on_return(stream.remote)
                for certificate in self._history.chain[request.from_round :]:
                    await reader.send(Kind.DATA, dump_json(certificate))
            elif request.what == "update":
                await _send_file(reader, await self._snapshots.update(request.digest) if request.digest else None)
            elif request.what == "file":
                assert request.digest is not None
                await _send_file(reader, self._files.path_of(request.digest) if self._files is not None else None)
            elif request.what == "state":
                await self._say_digest(reader, request)
            else:
                await self._offer_snapshot(reader, request)
            await reader.send(Kind.END)

    async def _request(self, stream: FrameStream) -> HistoryRequest:
        request = await stream.receive_message(Kind.REQUEST, HistoryRequest, self._node.timing.first_frame_s)
        if request.run_id != self._run_id:
            raise ProtocolError(f"{stream.remote} asks for run {request.run_id[:12]}")
        return request

    async def _say_digest(self, reader: Reader, request: HistoryRequest) -> None:
        assert request.digest is not None
        digest = await self._snapshots.digest(request.from_round, request.digest)
        if digest is not None:
            await reader.send(Kind.DATA, bytes.fromhex(digest))

    async def _offer_snapshot(self, reader: Reader, request: HistoryRequest) -> None:
        """Report to the joiner while the snapshot is written; if it leaves, it finds the file when it returns."""
        offering = asyncio.ensure_future(self._snapshots.offer(request.digest, request.from_round))
        try:
            while not (await asyncio.wait({offering}, timeout=self._node.timing.busy_period_s))[0]:
                with contextlib.suppress(StreamClosedError):
                    await reader.send(Kind.BUSY)
            file = offering.result()
        finally:
            await cancel_and_wait([offering])
        if file is not None:
            file.offered(reader.stream.remote)
            await reader.send(Kind.META, dump_json(file.meta))
            await reader.send(Kind.DATA, b"".join(file.digests))

    async def _serve_chunks(self, reader: Reader, request: HistoryRequest) -> None:
        """Chunks of one snapshot, whatever this peer's rounds do meanwhile, until the other end has enough of them."""
        assert request.digest is not None
        file = await self._snapshots.get(request.digest)
        stream = reader.stream
        if file is None:
            await reader.send(Kind.END)
            return
        allowed = 2 * len(file.places)  # a peer that asks for more occupies a slot without downloading
        with file.reading() as descriptor:
            while True:
                allowed -= len(request.indexes)
                if request.what != "chunks" or request.digest != file.meta.lineage_id or allowed < 0:
                    raise ProtocolError(f"{stream.remote} asks for more than the chunks of one snapshot")
                await self._send_chunks(reader, file, descriptor, request.indexes)
                reader.asked = self._node.clock()
                request = await self._request(stream)
                reader.asked = None

    async def _send_chunks(
        self, reader: Reader, file: SnapshotFile, descriptor: int, indexes: tuple[int, ...]
    ) -> None:
        stream = reader.stream
        for index in indexes:
            if index >= len(file.places):
                raise ProtocolError(f"{stream.remote} asks for chunk {index} of {len(file.places)}")
            first, length = file.places[index]
            async with self._priority.turn() as turn:
                chunk = await asyncio.to_thread(os.pread, descriptor, length, first)
                await reader.send(Kind.DATA, chunk, turn.wait)


async def _send_file(reader: Reader, path: Path | None) -> None:
    if path is None:
        return
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while content := await asyncio.to_thread(file.read, FRAME_BYTES):
            await reader.send(Kind.DATA, content)
