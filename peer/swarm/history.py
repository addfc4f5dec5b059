"""The chain of certificates, the last updates and the newest snapshot of this peer, on disk; served to whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from peer.errors import ProtocolError
from peer.outer.state import CHUNK, OuterState, chunks
from peer.protocol.lineage import Certificate, chain_weight
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import HistoryRequest, Kind, SnapshotMeta
from peer.swarm.node import Node
from peer.swarm.streams import Stream, StreamClosedError

log = logging.getLogger(__name__)
KEPT_UPDATES = 64
REQUEST_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 30.0  # one frame; whoever reads slower would hold a slot for ever
SERVED_AT_ONCE = 4
SLICE_BYTES = 1 << 20


def history_name(run_id: str) -> str:
    """Stream handler under which history is served."""
    return f"atoll/{run_id[:16]}/history"


class History:
    """What happened in a run, as far as this peer holds it.

    Args:
        folder: where updates, chain and snapshot files live; created if missing.
        genesis: lineage id 0.

    Attributes:
        chain: certificates from genesis on.
        weight: committed tokens of the whole chain.
    """

    def __init__(self, folder: Path, genesis: str) -> None:
        self.folder, self.genesis = folder, genesis
        self.chain: list[Certificate] = []
        self.weight = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def chain_path(self) -> Path:
        return self.folder / "chain.jsonl"

    def load(self, path: Path, lineage_id: str) -> bool:
        """Take the chain in `path` up to `lineage_id`; False when it does not lead there."""
        chain = read_chain(path)
        ids = [self.genesis, *(certificate.link.id for certificate in chain)]
        if lineage_id not in ids:
            return False
        self.replace(chain[: ids.index(lineage_id)])
        return True

    def append(self, certificate: Certificate, payload: bytes) -> None:
        """Record a committed round: the update first, then the link, each durable before the next."""
        _write(self._update_path(certificate.link.update_digest), payload)
        with self.chain_path.open("ab") as file:
            file.write(dump_json(certificate) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.chain.append(certificate)
        self.weight += certificate.link.weight
        self._prune()

    def replace(self, chain: list[Certificate]) -> None:
        """Take another chain (a resumed or an adopted one)."""
        _write(self.chain_path, b"".join(dump_json(certificate) + b"\n" for certificate in chain))
        self.chain = list(chain)
        self.weight = chain_weight(chain)
        self._prune()

    def _prune(self) -> None:
        kept = {self._update_path(one.link.update_digest) for one in self.chain[-KEPT_UPDATES:]}
        for path in set(self.folder.glob("update-*.bin")) - kept:
            path.unlink(missing_ok=True)

    def update(self, digest: str) -> Path | None:
        """The file of a kept update."""
        path = self._update_path(digest)
        return path if path.exists() else None

    def _update_path(self, digest: str) -> Path:
        return self.folder / f"update-{digest}.bin"


def read_chain(path: Path) -> list[Certificate]:
    """Certificates in a chain file; stops at the first damaged line (a torn write)."""
    chain: list[Certificate] = []
    if not path.exists():
        return chain
    for line in path.read_bytes().splitlines():
        try:
            chain.append(parse_json(Certificate, line))
        except ProtocolError as error:
            log.warning("%s: ignoring what follows round %d: %s", path, len(chain), error)
            break
    return chain


class SnapshotFile:
    """The outer state of one round as a file, with its chunk digests: written once, served to many."""

    def __init__(self, path: Path, meta: SnapshotMeta, digests: list[bytes]) -> None:
        self.path, self.meta, self.digests = path, meta, digests

    @classmethod
    def write(cls, path: Path, state: OuterState) -> SnapshotFile:
        """Write `state`; the caller holds the state still."""
        digests = state.chunk_digests()
        meta = SnapshotMeta(
            round=state.round,
            lineage_id=state.lineage_id,
            numel=state.numel,
            num_buffers=len(state.buffers),
            num_chunks=len(digests),
        )
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            for tensor in (state.anchor, *state.buffers):
                file.write(tensor.numpy().data)
        temporary.replace(path)
        return cls(path, meta, digests)


class HistoryServer:
    """Serves a `History` and, through `snapshot`, the current state.

    Args:
        snapshot: returns a snapshot file that may be read until the next call, or None.
    """

    def __init__(
        self, node: Node, run_id: str, history: History, snapshot: Callable[[], Awaitable[SnapshotFile | None]]
    ) -> None:
        self._node, self._run_id, self._history, self._snapshot = node, run_id, history, snapshot
        # apart: whoever takes a snapshot asks for the chain meanwhile
        self._slots = {what: asyncio.Semaphore(SERVED_AT_ONCE) for what in ("chain", "update", "snapshot")}

    async def start(self) -> None:
        await self._node.serve(history_name(self._run_id), "history", self._on_stream)

    async def _on_stream(self, stream: Stream) -> None:
        request = await asyncio.wait_for(stream.receive_message(Kind.REQUEST, HistoryRequest), REQUEST_TIMEOUT_S)
        if request.run_id != self._run_id:
            raise ProtocolError(f"{stream.remote} asks for run {request.run_id[:12]}")
        async with self._slots[request.what]:
            if request.what == "chain":
                for certificate in self._history.chain[request.from_round :]:
                    await _send(stream, Kind.DATA, dump_json(certificate))
            elif request.what == "update":
                await self._send_update(stream, request)
            else:
                await self._send_snapshot(stream)
            await _send(stream, Kind.END)

    async def _send_update(self, stream: Stream, request: HistoryRequest) -> None:
        path = self._history.update(request.digest) if request.digest else None
        if path is None:
            return
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, SLICE_BYTES):
                await _send(stream, Kind.DATA, piece)

    async def _send_snapshot(self, stream: Stream) -> None:
        snapshot = await self._snapshot()
        if snapshot is None:
            return
        with snapshot.path.open("rb") as file:
            await _send(stream, Kind.META, dump_json(snapshot.meta))
            await _send(stream, Kind.DATA, b"".join(snapshot.digests))
            for length in chunk_lengths(snapshot.meta):
                piece = await asyncio.to_thread(file.read, length)
                await _send(stream, Kind.DATA, piece)


def chunk_lengths(meta: SnapshotMeta) -> list[int]:
    """Bytes of each chunk of a snapshot, in order."""
    one_tensor = [4 * (stop - start) for start, stop in chunks(meta.numel, CHUNK)]
    return one_tensor * (1 + meta.num_buffers)


def load_snapshot(path: Path, state: OuterState) -> None:
    """Read a verified snapshot file into the state's tensors, in place."""
    with path.open("rb") as file:
        for tensor in (state.anchor, *state.buffers):
            for start, stop in chunks(state.numel, CHUNK):
                data = bytearray(file.read(4 * (stop - start)))
                tensor[start:stop] = torch.frombuffer(data, dtype=torch.float32)


async def _send(stream: Stream, kind: Kind, body: bytes = b"") -> None:
    try:
        await asyncio.wait_for(stream.send(kind, body), SEND_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise StreamClosedError(stream.remote, f"did not read for {SEND_TIMEOUT_S:g} s") from None


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
