"""Equal stretches of a file, whose rows are read without those before them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

import pyarrow.parquet as pq

from peer.data.formats import BOMS, TORN, Row, format_of, read_rows
from peer.data.problems import FileProblem


def can_be_cut(name: str) -> bool:
    """Whether a reader finds the rows of a stretch of such a file without those before it."""
    return format_of(name) in (("parquet", ""), ("jsonl", ""), ("ndjson", ""))


def units_of(raw: IO[bytes], name: str) -> int:
    """What the offsets of a file that can be cut count: its rows, or its bytes."""
    if format_of(name)[0] == "parquet":
        return int(pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False).metadata.num_rows)
    if raw.read(4).startswith(tuple(mark for mark, _ in BOMS)):
        raise FileProblem(f"{name}: text with a byte-order mark is not cut into stretches")
    return raw.seek(0, io.SEEK_END)


def read_stretch(raw: IO[bytes], name: str, column: str, stretch: tuple[int, int]) -> Iterator[Row]:
    """As `read_rows`, of the rows that begin in stretch (index, of) of `of` equal ones.

    Args:
        raw: the file, of a format that can be cut.

    Raises:
        FileProblem: also where the file cannot be read from any place of it.
    """
    if not can_be_cut(name) or not raw.seekable():
        raise FileProblem(f"{name}: it can only be read from its beginning")
    try:
        units, (index, of) = units_of(raw, name), stretch
    except TORN as error:
        raise FileProblem(f"{name}: torn or not {format_of(name)[0]}: {error}") from None
    at, end = units * index // of, units * (index + 1) // of
    if at and format_of(name)[0] != "parquet":
        raw.seek(at - 1)
        at += len(raw.readline()) - 1  # the first row that begins here
    raw.seek(0)
    for value, after in read_rows(raw, name, column, at) if at < end else ():
        yield value, after
        at = after
        if at >= end:
            return
