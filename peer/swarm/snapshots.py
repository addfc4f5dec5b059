"""Snapshot files: the outer state of one round, with the digests of its chunks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import torch

from peer.outer.state import CHUNK, OuterState, chunks, state_digest
from peer.protocol import hashing
from peer.protocol.wire import SnapshotMeta

HELD_S = 10.0  # after an offer or its last reader: who has to check a chain, or lost a stream, comes for the rest
MAX_HELD_S = 600.0  # even while somebody reads
MAX_OFFERED = 1024


class SnapshotFile:
    """The outer state of one round as a file, with its chunk digests: written once, served to many.

    Attributes:
        digest: of the state.
        readers: how many have it open.
        used_at: monotonic, when the last of them was seen, or the last peer was told of it.
    """

    def __init__(self, path: Path, meta: SnapshotMeta, digests: list[bytes]) -> None:
        self.path, self.meta, self.digests = path, meta, digests
        self.digest = state_digest(digests, meta.numel, meta.num_buffers)
        self.places = chunk_places(meta)
        self.readers = 0
        self._offered: set[str] = set()
        self.written_at = self.used_at = time.monotonic()

    @classmethod
    def write(cls, path: Path, state: OuterState, over: Path | None = None) -> SnapshotFile:
        """Write `state`; the caller holds the state still. `over`: see `SnapshotWriter`."""
        with SnapshotWriter(path, state, over) as writer:
            for _ in writer.meta_chunks():
                writer.copy()
                writer.put()
            return writer.finish()

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """The descriptor of the file, which stays readable even when the file is given up meanwhile."""
        self.readers, self.used_at = self.readers + 1, time.monotonic()
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        finally:
            self.readers, self.used_at = self.readers - 1, time.monotonic()

    def offered(self, remote: str) -> None:
        """A peer has been told of it, and needs a moment before it reads. Once: nobody holds it by asking."""
        if remote not in self._offered and len(self._offered) < MAX_OFFERED:
            self._offered.add(remote)
            self.used_at = time.monotonic()

    def give_up(self, spare: Path | None = None) -> None:
        """It is not served any more; who has it open reads on. Its pages become `spare` if nobody has."""
        if spare is None or self.readers:
            self.path.unlink(missing_ok=True)
        else:
            self.path.replace(spare)

    @property
    def in_use(self) -> bool:
        """Somebody reads it, or did or was told of it a moment ago; and it is not too old for that to count."""
        now = time.monotonic()
        return now - self.written_at < MAX_HELD_S and (self.readers > 0 or now - self.used_at < HELD_S)


class SnapshotWriter:
    """Writes a snapshot chunk by chunk; `finish` makes the file appear, leaving the context without it does not.

    Args:
        path: where it appears.
        state: must be at the same round whenever `copy` is called.
        over: a file that nobody reads, or none yet, which is written over, and left for the next writer if this one
            does not finish: what is on its pages already is written anew in a fraction of the time.
    """

    def __init__(self, path: Path, state: OuterState, over: Path | None = None) -> None:
        self._path, self._temporary, self._stays = path, over or path.with_suffix(".tmp"), over is not None
        tensors = (state.anchor, *state.buffers)
        self._chunks = [(tensor, *bounds) for tensor in tensors for bounds in chunks(state.numel, CHUNK)]
        self._copied = torch.empty(min(CHUNK, state.numel))
        self._length = 0
        self._digests: list[bytes] = []
        self.meta = SnapshotMeta(
            round=state.round,
            lineage_id=state.lineage_id,
            numel=state.numel,
            num_buffers=len(state.buffers),
            num_chunks=len(self._chunks),
        )

    def __enter__(self) -> SnapshotWriter:
        self._file = self._temporary.open("r+b" if self._temporary.exists() else "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None or not self._stays:
            self._temporary.unlink(missing_ok=True)

    def meta_chunks(self) -> range:
        """The numbers of the chunks, in the order in which they are copied."""
        return range(self.meta.num_chunks)

    def copy(self) -> None:
        """Take the next chunk; the caller holds the state still."""
        tensor, start, stop = self._chunks[len(self._digests)]
        self._length = stop - start
        self._copied[: self._length].copy_(tensor[start:stop])

    def put(self) -> None:
        """Hash and write what was copied last."""
        view = self._copied[: self._length].numpy().data.cast("B")
        self._digests.append(hashing.digest(view))
        self._file.write(view)

    def finish(self) -> SnapshotFile:
        """All chunks are written."""
        self._file.truncate()
        self._file.close()
        self._temporary.replace(self._path)
        return SnapshotFile(self._path, self.meta, self._digests)


def chunk_lengths(meta: SnapshotMeta) -> list[int]:
    """Bytes of each chunk of a snapshot, in order."""
    one_tensor = [4 * (stop - start) for start, stop in chunks(meta.numel, CHUNK)]
    return one_tensor * (1 + meta.num_buffers)


def chunk_places(meta: SnapshotMeta) -> list[tuple[int, int]]:
    """(first byte, bytes) of each chunk in the file, in order."""
    lengths = chunk_lengths(meta)
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def load_snapshot(path: Path, state: OuterState) -> None:
    """Read a verified snapshot file into the state's tensors, in place."""
    with path.open("rb") as file:
        for tensor in (state.anchor, *state.buffers):
            for start, stop in chunks(state.numel, CHUNK):
                file.readinto(tensor[start:stop].numpy().data.cast("B"))
