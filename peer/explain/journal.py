"""The round records that a peer keeps in its folder: JSON lines, bounded by rotation, readable while they grow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from peer.outer.record import RoundRecord
from peer.telemetry.lines import LinesFile, rotated

ROUNDS_FILE = "rounds.jsonl"
MAX_BYTES = 4 * 1024 * 1024  # with those that stay, 16 MB: at least 10,000 rounds of four peers
KEEP = 3


class RoundJournal:
    """Where a peer's agent writes its records, one a line, as each round ends.

    Args:
        max_bytes, keep: size of one file, and how many full ones stay.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        self._lines = LinesFile(folder / ROUNDS_FILE, max_bytes, keep)

    def append(self, record: RoundRecord) -> None:
        self._lines.append(record.model_dump_json(exclude_defaults=True).encode())

    def close(self) -> None:
        self._lines.close()


@dataclass
class JournalRead:
    """What a reading brought: records, oldest first, and for each line that is none, where it is and why."""

    records: list[RoundRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _LineAt:
    """How far a file has been read."""

    offset: int = 0
    line: int = 0


class JournalReader:
    """Reads a folder's records; `poll` again for those that have come since. A last line without its end waits.

    Args:
        folder: a peer's output folder; nothing needs to be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROUNDS_FILE
        self._places: dict[int, _LineAt] = {}  # by inode: a file keeps its place when it is rotated

    def poll(self) -> JournalRead:
        """The records added since the last poll. Raises OSError when a file is there and cannot be read."""
        found = JournalRead()
        places = {}
        with ExitStack() as stack:
            for file in _open_files(self._path, stack):
                status = os.fstat(file.fileno())
                place = self._places.get(status.st_ino, _LineAt())
                if status.st_size < place.offset:
                    place = _LineAt()
                places[status.st_ino] = place
                _read(file, place, found)
        self._places = places
        return found


def has_rounds(folder: Path) -> bool:
    """There is a journal in this folder."""
    path = folder / ROUNDS_FILE
    return path.is_file() or bool(rotated(path))


def _open_files(path: Path, stack: ExitStack) -> Iterator[BinaryIO]:
    """All files of a journal, oldest first; the newest is opened first, in case it is rotated meanwhile."""
    newest: list[BinaryIO] = []
    inodes = set()
    try:
        newest = [stack.enter_context(path.open("rb"))]
        inodes = {os.fstat(newest[0].fileno()).st_ino}
    except FileNotFoundError:
        pass
    for older in rotated(path):
        try:
            file = stack.enter_context(older.open("rb"))
        except FileNotFoundError:
            continue
        if os.fstat(file.fileno()).st_ino not in inodes:
            yield file
    yield from newest


def _read(file: BinaryIO, place: _LineAt, found: JournalRead) -> None:
    file.seek(place.offset)
    for line in file:
        if not line.endswith(b"\n"):
            return
        place.offset += len(line)
        place.line += 1
        try:
            found.records.append(RoundRecord.model_validate_json(line, strict=True))
        except ValidationError as error:
            name = Path(file.name).name
            found.problems.append(f"{name} line {place.line}: not a round record: {_reason(error)}")


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
