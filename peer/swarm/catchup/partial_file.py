"""A partial snapshot: a file that fills in any order, and an index of its chunks, so that a download can resume."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peer.errors import ProtocolError
from peer.protocol import hashing
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import SnapshotMeta
from peer.swarm.state.snapshot_file import chunk_places

MAX_INDEX_BYTES = 1 << 28
CHECKING_THREADS = 2
_LINE = re.compile(rb"[0-9]{1,8}")  # below MAX_CHUNKS; and int() refuses thousands of digits in its own way


class PartialFile:
    """The chunks of one snapshot that have arrived and are correct.

    index file = the snapshot's meta as one line of JSON, then a line with its number for each chunk, after its bytes.
    What the index says is only believed of chunks that still have their digest: a crash may have lost their bytes.

    Args:
        folder: holds `incoming.bin` and `incoming.index`.
        digests: of its chunks, checked against the state's digest.

    Attributes:
        has: one byte for each chunk, 1 if it is there.
        resumed: chunks that an earlier fetch had left.
    """

    def __init__(self, folder: Path, meta: SnapshotMeta, digests: Sequence[bytes]) -> None:
        self.path, self._index_path = folder / "incoming.bin", folder / "incoming.index"
        self.meta, self._digests = meta, tuple(digests)
        self.places = chunk_places(meta)
        self.has = bytearray(len(self.places))
        self.resumed = 0
        self._threads = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="chunks")

    @staticmethod
    def begun(folder: Path) -> SnapshotMeta | None:
        """The snapshot of an interrupted download."""
        found = _read_index(folder / "incoming.index")
        return found[0] if found is not None else None

    @staticmethod
    def discard(folder: Path) -> None:
        """Forget an interrupted fetch."""
        for name in ("incoming.index", "incoming.bin"):
            (folder / name).unlink(missing_ok=True)

    @property
    def missing(self) -> list[int]:
        """Numbers of the chunks that are not there."""
        return [index for index, there in enumerate(self.has) if not there]

    def open(self) -> None:
        """Resume an interrupted download of this snapshot, or begin."""
        found = _read_index(self._index_path)
        known = found[1] if found is not None and found[0] == self.meta else set()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, sum(self.places[-1]))
        for index in known:
            if index < len(self.has):
                first, length = self.places[index]
                self.has[index] = self._fits(index, os.pread(self._file, length, first))
        self.resumed = sum(self.has)
        lines = [f"{index}\n".encode() for index, there in enumerate(self.has) if there]
        self._index_path.write_bytes(dump_json(self.meta) + b"\n" + b"".join(lines))
        self._index = os.open(self._index_path, os.O_WRONLY | os.O_APPEND)

    async def put(self, index: int, body: memoryview) -> bool:
        """Keep a chunk; False if its digest is wrong. Few are checked at once."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._put, index, body)

    def _put(self, index: int, body: memoryview) -> bool:
        if not self._fits(index, body):
            return False
        first, length = self.places[index]
        written = os.pwrite(self._file, body, first)
        if written != length:
            raise OSError(f"{self.path}: wrote {written} of {length} bytes")
        os.write(self._index, f"{index}\n".encode())
        self.has[index] = 1
        return True

    def close(self) -> None:
        """Close the files; the download is interrupted."""
        self._threads.shutdown(cancel_futures=True)  # at most the chunks that are being checked
        os.close(self._file)
        os.close(self._index)

    def finish(self) -> Path:
        """The whole file, which is no longer partial."""
        assert all(self.has), f"{self.has.count(0)} chunks are missing"
        self._index_path.unlink()
        return self.path

    def _fits(self, index: int, body: bytes | memoryview) -> bool:
        return len(body) == self.places[index][1] and hashing.digest(body) == self._digests[index]


def _read_index(path: Path) -> tuple[SnapshotMeta, set[int]] | None:
    """What an index file says; None if there is none, or it does not begin as one. A torn last line counts nothing."""
    with contextlib.suppress(OSError, ProtocolError):
        if path.stat().st_size <= MAX_INDEX_BYTES:
            head, *lines = path.read_bytes().split(b"\n")
            return parse_json(SnapshotMeta, head), {int(line) for line in lines[:-1] if _LINE.fullmatch(line)}
    return None
