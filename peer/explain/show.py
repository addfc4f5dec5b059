"""Reads the records of a folder and prints them, in words or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from peer.errors import UserError
from peer.explain.journal import JournalRead, JournalReader
from peer.explain.names import Names
from peer.explain.page import Local, Page, page_console
from peer.explain.words import Entry, entries, last_group, summary
from peer.outer.record import RoundRecord
from peer.telemetry.status import read_status

FOLLOW_PERIOD_S = 0.5
MAX_WARNINGS = 8


@dataclass(frozen=True, kw_only=True)
class RoundsOptions:
    """What to show. `last`: of records as JSON, of entries in words; 0 is all. `failed`: only what was aborted.

    Raises:
        UserError: out of range.
    """

    last: int = 10
    failed: bool = False
    as_json: bool = False
    follow: bool = False

    def __post_init__(self) -> None:
        if self.last < 0:
            raise UserError(f"--last={self.last}: must be at least 0", "0 shows all records that there are.")

    def wants(self, record: RoundRecord) -> bool:
        return record.status == "aborted" or not self.failed


def show_rounds(
    folder: Path, options: RoundsOptions, pause: Callable[[float], None] = time.sleep, local: Local = time.localtime
) -> int:
    """Print the records of a folder; -> exit code. Following ends with KeyboardInterrupt, as from Ctrl-C.

    Args:
        folder: a peer's, with records unless `follow` waits for them.
        pause: called between two looks.
        local: unix seconds -> the time of day here.

    Raises:
        UserError: nothing there that can be read.
    """
    reader = JournalReader(folder)
    found = _poll(reader, folder)
    if not found.records and not options.follow:
        raise _nothing_readable(folder, found)
    later = _later(reader, folder, pause) if options.follow else iter(())
    try:
        (_as_json if options.as_json else _in_words)(folder, options, found.records, later, local)
    except KeyboardInterrupt:
        if not options.follow:
            raise
    return 0


def _later(reader: JournalReader, folder: Path, pause: Callable[[float], None]) -> Iterator[list[RoundRecord]]:
    while True:
        pause(FOLLOW_PERIOD_S)
        yield _poll(reader, folder).records


def _as_json(
    _folder: Path, options: RoundsOptions, records: list[RoundRecord], later: Iterator[list[RoundRecord]], _local: Local
) -> None:
    wanted = [record for record in records if options.wants(record)][-options.last :]
    if not options.follow:
        print(json.dumps([record.model_dump(mode="json") for record in wanted], indent=2))
        return
    for some in chain([wanted], later):
        for record in some:
            if options.wants(record):
                print(json.dumps(record.model_dump(mode="json")), flush=True)


def _in_words(
    folder: Path, options: RoundsOptions, records: list[RoundRecord], later: Iterator[list[RoundRecord]], local: Local
) -> None:
    names = Names({row.peer_id: row.nickname for row in read_status(folder / "status.json")})
    names.learn(records)
    page = Page(page_console(), names, local)
    own = next((record.peer_id for record in reversed(records) if record.peer_id is not None), None)
    page.line(f"{folder}" + (f": {names.full(own)}" if own is not None else ""))
    told = _wanted(entries(records), options)[-options.last :]
    page.show(told)
    if not options.follow:
        shown = [record for entry in told for record in entry.records]
        counts = f"{len(shown)} of {len(records)} records: {summary(shown)}"
        page.line()
        page.line(counts if shown else f"nothing was aborted in {len(records)} records")
    before = last_group(records)
    for some in later:
        names.learn(some)
        page.show(_wanted(entries(some, before), options))
        before = last_group(some, before)


def _wanted(told: list[Entry], options: RoundsOptions) -> list[Entry]:
    return [entry for entry in told if options.wants(entry.last)]


def _poll(reader: JournalReader, folder: Path) -> JournalRead:
    """The new records; stderr names the lines that were skipped."""
    try:
        found = reader.poll()
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}", "Run this as the peer's user.") from None
    for problem in found.problems[:MAX_WARNINGS] if found.records else ():
        print(f"atoll: {folder / problem}; left out", file=sys.stderr)
    return found


def _nothing_readable(folder: Path, found: JournalRead) -> UserError:
    if not found.problems:
        return UserError(f"{folder}: no round has been recorded yet", "--follow waits for the first one.")
    return UserError(
        f"{folder / found.problems[0]}",
        "Another version of atoll has written it, or the disk is damaged. Move the file away to start a new one.",
    )
