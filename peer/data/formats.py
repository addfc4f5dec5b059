"""Files of text in every format that is read -> rows, each with the offset at which the next one begins.

An offset counts bytes of the decompressed UTF-8 text, or rows in columnar files. Whatever offset a row came with, the
rows after it are the same as in one pass: a reader can begin there.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from peer.data.problems import FileProblem

Row = tuple[Any, int]
MAX_ROW_BYTES = 1 << 26
PIECE_BYTES = 1 << 22  # a longer text is several documents
SNIFFED_BYTES = 1 << 13
BATCH_ROWS = 256
TOO_LONG = object()
MESSAGES = "messages"  # the column of conversations, where there is not the one of text
BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
TORN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pa.ArrowInvalid, pa.ArrowNotImplementedError)


def format_of(name: str) -> tuple[str, str]:
    """(format, compression) by the suffixes of a file's name: `a.jsonl.gz` -> ("jsonl", "gz"); "" for none."""
    suffixes = [suffix[1:].lower() for suffix in PurePath(name).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in _OPENERS else ""
    return (suffixes[-1] if suffixes and suffixes[-1] in _READERS else "text"), packed


def read_rows(raw: IO[bytes], name: str, column: str, offset: int) -> Iterator[Row]:
    """(value, offset of the next row) of every row from `offset` on: of the column, or whole documents of a text file.

    Args:
        raw: the file from its first byte, seekable or not.
        name: its suffixes tell the format.

    Raises:
        FileProblem: the file is torn or not of its format; the rows before that were good.
    """
    kind, packed = format_of(name)
    try:
        plain = _OPENERS[packed](raw)
        if kind in _COLUMNAR:
            with _seekable(plain) as file:
                yield from _READERS[kind](file, column, offset)
        else:
            yield from _READERS[kind](_utf8(plain, name), column, offset)
    except UnicodeError as error:
        raise FileProblem(f"{name}: not the encoding that its first bytes announce: {error}") from None
    except TORN as error:
        raise FileProblem(f"{name}: torn or not {kind}{' in ' + packed if packed else ''}: {error}") from None


def _utf8(plain: IO[bytes], name: str) -> io.BufferedIOBase:
    """The same text as UTF-8 without a byte-order mark. Raises FileProblem if it is no text."""
    stream = plain if isinstance(plain, io.BufferedReader) else io.BufferedReader(plain, 1 << 16)  # type: ignore[type-var]
    head = stream.peek(SNIFFED_BYTES)[:SNIFFED_BYTES]
    for mark, encoding in BOMS:
        if head.startswith(mark):
            stream.read(len(mark))
            return stream if encoding == "utf-8" else _Recoded(stream, encoding)
    if b"\0" in head:
        raise FileProblem(f"{name}: not text; formats are text, jsonl, json, csv, parquet and arrow")
    return stream


class _Recoded(io.BufferedIOBase):
    """Text of another encoding, as UTF-8."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self._reader = codecs.getreader(encoding)(stream, "replace")
        self._left = b""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        while size < 0 or len(self._left) < size:
            text = self._reader.read(1 << 16)
            if not text:
                break
            self._left += text.encode("utf-8", "replace")
        size = len(self._left) if size < 0 else size
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def readline(self, size: int | None = -1) -> bytes:
        assert size is not None
        while b"\n" not in self._left and (size < 0 or len(self._left) < size):
            text = self._reader.read(1 << 16)
            if not text:
                break
            self._left += text.encode("utf-8", "replace")
        end = self._left.find(b"\n") + 1 or len(self._left)
        return self.read(end if size < 0 else min(end, size))


def _skip(stream: io.BufferedIOBase, count: int) -> None:
    if stream.seekable():
        stream.seek(count, io.SEEK_CUR)
        return
    while count > 0 and (read := len(stream.read(min(count, 1 << 20)))):
        count -= read


def _text(stream: io.BufferedIOBase, column: str, offset: int) -> Iterator[Row]:  # noqa: ARG001
    """The file as one document, or several where it is longer than a piece; cut behind a line, or a character."""
    _skip(stream, offset)
    left = b""
    while data := left + stream.read(PIECE_BYTES - len(left)):
        end = len(data)
        if end >= PIECE_BYTES:
            end = data.rfind(b"\n") + 1 or data.rfind(b" ") + 1 or _whole_characters(data)
        offset += end
        yield data[:end].decode("utf-8", "replace").replace("\r\n", "\n"), offset
        left = data[end:]


def _whole_characters(data: bytes) -> int:
    """Bytes up to the end of the last character that is whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0])


def _lines(stream: io.BufferedIOBase, offset: int) -> Iterator[tuple[bytes | None, int]]:
    """Lines, or None in the place of one that is too long."""
    while line := stream.readline(MAX_ROW_BYTES):
        offset += len(line)
        whole = line.endswith(b"\n") or len(line) < MAX_ROW_BYTES
        while not whole and (rest := stream.readline(MAX_ROW_BYTES)):
            offset += len(rest)
            whole, line = rest.endswith(b"\n"), b""
        yield line or None, offset


def _jsonl(stream: io.BufferedIOBase, column: str, offset: int) -> Iterator[Row]:
    _skip(stream, offset)
    for line, after in _lines(stream, offset):
        if line is None:
            yield TOO_LONG, after
        elif line.strip():
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError) as error:
                row = error
            yield _value(row, column), after


def _value(row: Any, column: str) -> Any:
    """What a row says: the column of an object, or a bare string; KeyError, ValueError in its place if none."""
    if isinstance(row, dict):
        return row.get(column, row.get(MESSAGES, KeyError(column)))
    return row


def _json(stream: io.BufferedIOBase, column: str, offset: int) -> Iterator[Row]:
    """An array of rows, or one object for each line; offsets count rows."""
    decoder, text, at, count = json.JSONDecoder(), "", 0, 0
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        more = stream.read(1 << 20)
        text, at = text[at:] + utf8.decode(more, final=not more), 0
        while True:
            while at < len(text) and text[at] in " \t\r\n,[]":
                at += 1
            if at >= len(text):
                break
            try:
                row, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if more and len(text) - at < MAX_ROW_BYTES:
                    break  # the rest of it is still to come
                raise FileProblem(f"row {count}: {error}") from None
            count += 1
            if count > offset:
                yield _value(row, column), count
        if not more:
            return


def _csv(stream: io.BufferedIOBase, column: str, offset: int, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for line, after in _lines(stream, at):
            at = after
            yield (line or b"").decode("utf-8", "replace").replace("\0", "")

    header = next(csv.reader(lines(), delimiter=delimiter), [])
    if column not in header:
        names = ", ".join(header[:16])
        raise FileProblem(f"no column {column!r}; it has {names}")
    place = header.index(column)
    if offset:
        _skip(stream, offset - at)
        at = offset
    try:
        for row in csv.reader(lines(), delimiter=delimiter):
            if row:
                yield row[place] if place < len(row) else KeyError(column), at
    except csv.Error as error:
        raise FileProblem(f"not csv: {error}") from None


def _tsv(stream: io.BufferedIOBase, column: str, offset: int) -> Iterator[Row]:
    return _csv(stream, column, offset, "\t")


def _column(column: str, names: list[str]) -> str:
    if column not in names and MESSAGES not in names:
        raise FileProblem(f"no column {column!r}; it has {', '.join(names[:16])}")
    return column if column in names else MESSAGES


def _parquet(file: IO[bytes], column: str, offset: int) -> Iterator[Row]:
    table = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    column = _column(column, table.schema_arrow.names)
    before = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if before + rows > offset:
            batches = table.iter_batches(BATCH_ROWS, [group], [column], use_threads=False)
            yield from _values(batches, before, offset)
        before += rows


def _arrow(file: IO[bytes], column: str, offset: int) -> Iterator[Row]:
    if file.read(6) == b"ARROW1":
        file.seek(0)
        reader = pa.ipc.open_file(file)
        column = _column(column, reader.schema.names)
        numbers = range(reader.num_record_batches)
        batches: Iterator[Any] = (reader.get_batch(number).select([column]) for number in numbers)
    else:
        file.seek(0)
        stream = pa.ipc.open_stream(file)
        column = _column(column, stream.schema.names)
        batches = (batch.select([column]) for batch in stream)
    yield from _values(batches, 0, offset)


def _values(batches: Iterator[Any], before: int, offset: int) -> Iterator[Row]:
    for batch in batches:
        if before + batch.num_rows > offset:
            for index, value in enumerate(batch.column(0).to_pylist(), before + 1):
                if index > offset:
                    yield value, index
        before += batch.num_rows


@contextmanager
def _seekable(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The file, or a copy on the disk where it can only be read from its beginning."""
    if file.seekable() and not isinstance(file, gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile):
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        while data := file.read(1 << 20):
            copy.write(data)
        copy.seek(0)
        yield copy


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_Unseekable(pa.CompressedInputStream(raw, "zstd")), 1 << 16)


class _Unseekable(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise EOFError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)


_OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    "": lambda raw: raw, "gz": lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)), "zst": _zstd,
    "bz2": bz2.BZ2File, "xz": lzma.LZMAFile,
}  # fmt: skip
_COLUMNAR = {"parquet": _parquet, "arrow": _arrow}
_READERS: dict[str, Callable[[Any, str, int], Iterator[Row]]] = {
    "text": _text, "jsonl": _jsonl, "ndjson": _jsonl, "json": _json, "csv": _csv, "tsv": _tsv, **_COLUMNAR,
}  # fmt: skip
