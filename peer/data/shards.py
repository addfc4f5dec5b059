"""Shards: files in an order, read row by row from a cursor."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from peer.data.chat import conversation_or_reason
from peer.data.cut_files import read_stretch
from peer.data.formats import TOO_LONG, read_rows
from peer.data.problems import FileProblem
from peer.data.web import WebFile

COPY = ".copy"  # suffix
FILE_BITS = 48  # a cursor is the number of a file in its shard, and an offset in that file
_KINDS = {type(None): "null", bool: "number", int: "number", float: "number", list: "list", dict: "object"}


class DataFile(BaseModel):
    """One file of text.

    Attributes:
        name: for messages; its suffixes tell the format.
        place: a URL or an absolute path.
        tag: changes with the content: a commit, a digest, or size and time.
        sha256: of the content, which is refused if it has another one; None: not checked.
        hub: a URL of the hub, to which the user's token goes.
        public: must not lead to this machine or its network.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    place: str
    tag: str
    sha256: str | None = None
    hub: bool = False
    public: bool = False


Shard = tuple[DataFile, ...]


@dataclass
class Problems:
    """What was wrong with files: a line each, and whether one of them has not the promised content."""

    lines: list[str] = field(default_factory=list)
    refused: bool = False


class WrongContent(FileProblem):
    """A file has another digest than was promised."""


def shard_rows(
    shard: Sequence[DataFile], column: str, cursor: int, headers: Mapping[str, str], problems: Problems
) -> Iterator[tuple[Any, int]]:
    """(value, cursor of the next row) from `cursor` on.

    Args:
        headers: for the hub.
        problems: called for each truncated file; the rows before the break are yielded.

    Raises:
        SourceBusy: a file cannot be read now; begin again at the last cursor.
    """
    first, offset = cursor >> FILE_BITS, cursor & ((1 << FILE_BITS) - 1)
    for number in range(first, len(shard)):
        file = shard[number]
        with _noting(problems, file), open_file(file, headers) as raw:
            for value, after in read_rows(raw, file.name, column, offset if number == first else 0):
                yield value, number << FILE_BITS | after


def stretch_rows(
    file: DataFile, column: str, stretch: tuple[int, int], headers: Mapping[str, str], problems: Problems, folder: Path
) -> Iterator[tuple[Any, int]]:
    """As `shard_rows`, of the rows of one stretch of a file, see `read_stretch`.

    Args:
        folder: for a copy of a file whose digest must be checked; the rows are read from that.
    """
    with _noting(problems, file), _open_for_stretches(file, headers, folder) as raw:
        yield from read_stretch(raw, file.name, column, stretch)


@contextlib.contextmanager
def _noting(problems: Problems, file: DataFile) -> Iterator[None]:
    """Note what is wrong with the file; what was read of it before is good."""
    try:
        yield
    except FileProblem as problem:
        problems.lines.append(named(file, str(problem)))
        problems.refused |= isinstance(problem, WrongContent)
    except OSError as error:
        problems.lines.append(named(file, error.strerror or str(error)))


def _open_for_stretches(file: DataFile, headers: Mapping[str, str], folder: Path) -> IO[bytes]:
    if file.sha256 is None:
        return open_file(file, headers)
    path = folder / f"{file.sha256}{COPY}"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open_file(file, headers) as raw, temporary.open("wb") as copy:
                shutil.copyfileobj(raw, copy, 1 << 20)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    os.utime(path)
    return path.open("rb")


def text_or_reason(value: Any) -> tuple[str, str | None]:
    """(text, None) of a row that holds text or a conversation; otherwise ("", why the row is left out)."""
    if isinstance(value, str):
        return (value, None) if value.strip() else ("", "empty")
    if value is TOO_LONG:
        return "", "too long"
    if isinstance(value, KeyError):
        return "", "without the column"
    if isinstance(value, list) and value:
        return conversation_or_reason(value)
    return "", _KINDS.get(type(value), "not JSON" if isinstance(value, Exception) else "not text")


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is for validation: by SHA-256 of its content, the same on every machine."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:6], "big") < fraction * 2**48


def named(file: DataFile, problem: str) -> str:
    """The problem with the name of its file before it, if it does not name that itself."""
    return problem if file.name in problem or file.place in problem else f"{file.name}: {problem}"


def open_file(file: DataFile, headers: Mapping[str, str]) -> IO[bytes]:
    """The bytes of a file, checked if its digest is known. Raises FileProblem, SourceBusy, OSError."""
    if "://" not in file.place:
        raw: IO[bytes] = open(file.place, "rb")  # noqa: SIM115 - the caller closes it
    else:
        raw = io.BufferedReader(WebFile(file.place, headers if file.hub else None, public=file.public), 1 << 18)
    return raw if file.sha256 is None else io.BufferedReader(_Checked(raw, file.sha256), 1 << 16)


class _Checked(io.RawIOBase):
    """A stream that ends with a `FileProblem` if its content is not the one that was promised."""

    def __init__(self, raw: IO[bytes], sha256: str) -> None:
        self._raw, self._wanted, self._hash = raw, sha256, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(len(buffer))
        if not data and self._hash.hexdigest() != self._wanted:
            raise WrongContent(f"its SHA-256 is {self._hash.hexdigest()}, not {self._wanted}")
        self._hash.update(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()

