"""Segments: a few megabytes of a shard as token ids in one file, made once and used again after a restart."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from peer.data.encode import DocumentEncoder, TextEncoder, narrowed
from peer.data.shards import COPY, DataFile, Problems, is_held_out, text_or_reason
from peer.protocol import hashing

SEGMENT_BYTES = 4 << 20  # of text
BATCH_CHARS = 1 << 18  # encoded in one call
HEADER_BYTES = 1 << 12
VERSION = 2  # of the file's format and of what is made of rows
MAX_PROBLEM_CHARS = 400
MAX_PROBLEMS = 4


class SegmentHeader(BaseModel):
    """The first line of a segment's file.

    Attributes:
        tokens: their number; of type `dtype`, after HEADER_BYTES.
        digest: BLAKE3 of their bytes, 64 hex digits.
        next: cursor of the segment after it; None: the shard ends.
        documents, held_out: in the segment, and passed over because they are for validation.
        text_bytes, read_bytes: of the documents, and of all text that was passed over for them.
        left_out: why -> how many rows.
        problems: files that ended before their time.
        refused: the content is not the promised one: no more of the shard is to be used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    tokens: int
    dtype: str
    digest: str
    next: int | None
    documents: int
    held_out: int
    text_bytes: int
    read_bytes: int
    left_out: dict[str, int]
    problems: list[str]
    refused: bool


class SegmentRule(BaseModel):
    """What is made of a shard's rows.

    Attributes:
        column: of rows that have columns.
        train_on: of conversations, see `DocumentEncoder`.
        fraction: of all documents, for validation.
        validation: take these, and not the others.
        limit_bytes: of text, behind which a segment ends.
        limit_tokens, limit_read_bytes: in its place for validation: of tokens, or of text that was looked through.
        stretch: (index, of): the rows of one of so many equal stretches of the file, and no others.
        passed_over: the segment is another peer's: it has no tokens, and says where the next one begins.
    """

    model_config = ConfigDict(frozen=True)
    column: str
    train_on: str = "assistant"
    fraction: float
    validation: bool = False
    limit_bytes: int
    limit_tokens: int | None = None
    limit_read_bytes: int | None = None
    stretch: tuple[int, int] | None = None
    passed_over: bool = False


def segment_path(folder: Path, shard: Sequence[DataFile], rule: SegmentRule, encoder_id: str, cursor: int) -> Path:
    """Where the segment of this content lies, whether it is there or not."""
    what = [VERSION, encoder_id, rule.model_dump(), cursor, [(f.name, f.place, f.tag, f.sha256) for f in shard]]
    return folder / f"{hashing.digest(json.dumps(what, sort_keys=True).encode()).hex()[:40]}.tokens"


def encoder_id_of(encoder: TextEncoder) -> str:
    """Digest of what the encoder does, 64 hex digits."""
    return hashing.digest(json.dumps(encoder.document, sort_keys=True).encode()).hex()


def write_segment(
    path: Path, rows: Iterator[tuple[Any, int]], rule: SegmentRule, encoder: TextEncoder, problems: Problems
) -> SegmentHeader:
    """Take rows until there is enough text, and write the segment's file.

    Args:
        rows: `shard_rows` from the cursor of the segment on; the rest of it may make the next segment.
        problems: of the files; told once.

    Raises:
        SourceBusy: a file cannot be read now.
        OSError: the file cannot be written.
    """
    made = _Making(rule, encoder)
    next_cursor = made.take(rows)
    stored = np.concatenate(made.pieces) if made.pieces else np.empty(0, dtype=np.uint16)
    header = SegmentHeader(
        tokens=len(stored), dtype=stored.dtype.str, digest=hashing.digest(stored.data).hex(), next=next_cursor,
        documents=made.documents, held_out=made.held_out, text_bytes=made.text_bytes,
        read_bytes=made.read_bytes, left_out=dict(made.left_out),
        problems=[problem[:MAX_PROBLEM_CHARS] for problem in problems.lines[:MAX_PROBLEMS]], refused=problems.refused,
    )  # fmt: skip
    problems.lines.clear()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header.model_dump_json().encode().ljust(HEADER_BYTES - 1) + b"\n")
            file.write(stored.data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return header


class _Making:
    """Documents -> tokens, encoded many at a time."""

    def __init__(self, rule: SegmentRule, encoder: TextEncoder) -> None:
        self._rule, self._encoder = rule, DocumentEncoder(encoder, rule.train_on)
        self._waiting: list[str] = []
        self._chars = self._tokens = 0
        self.pieces: list[npt.NDArray[Any]] = []
        self.documents = self.held_out = self.text_bytes = self.read_bytes = 0
        self.left_out = self._encoder.left_out

    def take(self, rows: Iterator[tuple[Any, int]]) -> int | None:
        """The cursor behind the last row that was taken; None: there are no more."""
        for value, after in rows:
            text, reason = text_or_reason(value)
            self.read_bytes += len(text)
            if reason is not None:
                self.left_out[reason] += 1
            elif is_held_out(text, self._rule.fraction) != self._rule.validation:
                self.held_out += 1
            else:
                self._add(text)
            if self._enough:
                self._encode()
                return after
        self._encode()
        return None

    @property
    def _enough(self) -> bool:
        limit, most = self._rule.limit_tokens, self._rule.limit_read_bytes
        if most is not None and self.read_bytes >= most:
            return True
        return self._tokens >= limit if limit is not None else self.text_bytes >= self._rule.limit_bytes

    def _add(self, text: str) -> None:
        self.text_bytes += len(text.encode("utf-8", "replace"))
        if self._rule.passed_over:
            return
        self.documents += 1
        self._waiting.append(text)
        self._chars += len(text)
        if self._chars >= BATCH_CHARS or self._rule.limit_tokens is not None:
            self._encode()

    def _encode(self) -> None:
        for tokens in self._encoder.tokens_of(self._waiting):
            self.pieces.append(narrowed(tokens))
            self._tokens += len(tokens)
        self._waiting, self._chars = [], 0


def read_segment(path: Path) -> tuple[SegmentHeader, npt.NDArray[Any]] | None:
    """(header, tokens mapped into memory) of a segment's file; None if there is none that is whole."""
    try:
        with path.open("rb") as file:
            header = SegmentHeader.model_validate_json(file.read(HEADER_BYTES))
        size = HEADER_BYTES + header.tokens * {"<u2": 2, "<u4": 4}.get(header.dtype, 0)
        if path.stat().st_size != size:
            return None
        tokens: npt.NDArray[Any] = np.empty(0, dtype=header.dtype)
        if header.tokens:
            tokens = np.memmap(path, dtype=header.dtype, mode="r", offset=HEADER_BYTES)
        if hashing.digest(tokens.data).hex() != header.digest:
            return None
        os.utime(path)
    except (OSError, ValidationError, ValueError):
        return None
    return header, tokens


class SegmentCache:
    """The folder of segments and of copies of files, of at most so many bytes: what was not used longest goes first."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for stray in folder.glob("*.tmp"):
            stray.unlink(missing_ok=True)

    def trim(self) -> None:
        """Delete what is beyond the limit."""
        found = []
        for path in (*self.folder.glob("*.tokens"), *self.folder.glob(f"*{COPY}")):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        found.sort(reverse=True)
        totals = itertools.accumulate(size for _, _, size in found)
        for (_, path, _), total in zip(found, totals, strict=True):
            if total > self._limit_bytes:
                path.unlink(missing_ok=True)
