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
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_cache import Snapshots
from peer.swarm.state.snapshot_file import SnapshotFile
from peer.tokenizer_files import TokenizerFiles

SERVED_AT_ONCE = 4
BULK_STREAMS = 4
BULK_STREAMS_PER_PEER = 2
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
        self._slots = {what: asyncio.Semaphore(SERVED_AT_ONCE) for what in ("state", "chain", "update", "snapshot")}
        self._bulk = {what: Admission(BULK_STREAMS, BULK_STREAMS_PER_PEER) for what in ("chunks", "file")}

    async def start(self) -> None:
        await self._node.serve(history_name(self._run_id), "history", self._on_stream)

    async def _on_stream(self, stream: FrameStream) -> None:
        request = await self._request(stream)
        if request.what in self._bulk:
            with self._bulk[request.what].of(stream.remote) as admitted:
                if not admitted:
                    await stream.send(Kind.BUSY, timeout_s=self._node.timing.frame_timeout_s)
                elif request.what == "chunks":
                    await self._serve_chunks(stream, request)
                else:
                    await self._serve_file(stream, request)
            return
        async with self._slots[request.what]:
            if request.what == "chain":
                if 0 < request.from_round < len(self._history.chain) and self._history.seen[stream.remote]:
                    self._on_return(stream.remote)
                for certificate in self._history.chain[request.from_round :]:
                    await stream.send(Kind.DATA, dump_json(certificate), timeout_s=self._node.timing.frame_timeout_s)
            elif request.what == "update":
                await self._send_file(stream, await self._snapshots.update(request.digest) if request.digest else None)
            elif request.what == "state":
                await self._say_digest(stream, request)
            else:
                await self._offer_snapshot(stream, request)
            await stream.send(Kind.END, timeout_s=self._node.timing.frame_timeout_s)

    async def _request(self, stream: FrameStream) -> HistoryRequest:
        request = await stream.receive_message(Kind.REQUEST, HistoryRequest, self._node.timing.first_frame_s)
        if request.run_id != self._run_id:
            raise ProtocolError(f"{stream.remote} asks for run {request.run_id[:12]}")
        return request

    async def _say_digest(self, stream: FrameStream, request: HistoryRequest) -> None:
        assert request.digest is not None
        digest = await self._snapshots.digest(request.from_round, request.digest)
        if digest is not None:
            await stream.send(Kind.DATA, bytes.fromhex(digest), timeout_s=self._node.timing.frame_timeout_s)

    async def _serve_file(self, stream: FrameStream, request: HistoryRequest) -> None:
        assert request.digest is not None
        await self._send_file(stream, self._files.path_of(request.digest) if self._files is not None else None)
        await stream.send(Kind.END, timeout_s=self._node.timing.frame_timeout_s)

    async def _send_file(self, stream: FrameStream, path: Path | None) -> None:
        if path is None:
            return
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            while content := await asyncio.to_thread(file.read, FRAME_BYTES):
                await stream.send(Kind.DATA, content, timeout_s=self._node.timing.frame_timeout_s)

    async def _offer_snapshot(self, stream: FrameStream, request: HistoryRequest) -> None:
        """Report to the joiner while the snapshot is written; if it leaves, it finds the file when it returns."""
        offering = asyncio.ensure_future(self._snapshots.offer(request.digest, request.from_round))
        try:
            while not (await asyncio.wait({offering}, timeout=self._node.timing.busy_period_s))[0]:
                with contextlib.suppress(StreamClosedError):
                    await stream.send(Kind.BUSY, timeout_s=self._node.timing.frame_timeout_s)
            file = offering.result()
        finally:
            await cancel_and_wait([offering])
        if file is not None:
            file.offered(stream.remote)
            await stream.send(Kind.META, dump_json(file.meta), timeout_s=self._node.timing.frame_timeout_s)
            await stream.send(Kind.DATA, b"".join(file.digests), timeout_s=self._node.timing.frame_timeout_s)

    async def _serve_chunks(self, stream: FrameStream, request: HistoryRequest) -> None:
        """Chunks of one snapshot, whatever this peer's rounds do meanwhile, until the other end has enough of them."""
        assert request.digest is not None
        file = await self._snapshots.get(request.digest)
        if file is None:
            await stream.send(Kind.END, timeout_s=self._node.timing.frame_timeout_s)
            return
        allowed = 2 * len(file.places)  # a peer that asks for more occupies a slot without downloading
        with file.reading() as descriptor:
            while True:
                allowed -= len(request.indexes)
                if request.what != "chunks" or request.digest != file.meta.lineage_id or allowed < 0:
                    raise ProtocolError(f"{stream.remote} asks for more than the chunks of one snapshot")
                await self._send_chunks(stream, file, descriptor, request.indexes)
                request = await self._request(stream)

    async def _send_chunks(
        self, stream: FrameStream, file: SnapshotFile, descriptor: int, indexes: tuple[int, ...]
    ) -> None:
        for index in indexes:
            if index >= len(file.places):
                raise ProtocolError(f"{stream.remote} asks for chunk {index} of {len(file.places)}")
            first, length = file.places[index]
            async with self._priority.turn() as turn:
                chunk = await asyncio.to_thread(os.pread, descriptor, length, first)
                await stream.send(Kind.DATA, chunk, turn.wait, self._node.timing.frame_timeout_s)
