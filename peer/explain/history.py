"""The history of a run in a SQLite file: figures over time and rounds in words, bounded by thinning out old ones."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from peer.errors import UserError
from peer.explain.swarm_state import CurvePoint, RoundEvent

log = logging.getLogger(__name__)
FILE_NAME = "history.sqlite"
MAX_POINTS, MAX_EVENTS, MAX_NAMES = 20_000, 100_000, 10_000
WITH_DETAILS = 5_000  # of the newest events
BUSY_S = 5.0
_STEPS = (  # each leads to the next version of the schema; the first from an empty file
    """
CREATE TABLE points (time REAL PRIMARY KEY, round INTEGER NOT NULL, tokens INTEGER NOT NULL, peers INTEGER NOT NULL,
  tokens_per_s REAL NOT NULL, loss REAL, validation REAL, validated INTEGER, utilisation REAL) WITHOUT ROWID;
CREATE TABLE names (id INTEGER PRIMARY KEY, peer_id TEXT NOT NULL UNIQUE, nickname TEXT NOT NULL, seen REAL NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, round INTEGER NOT NULL, at REAL,
  status TEXT NOT NULL, tone TEXT NOT NULL, headline TEXT NOT NULL, details TEXT NOT NULL, teller TEXT NOT NULL,
  members TEXT NOT NULL, tokens INTEGER NOT NULL, lineage_id TEXT NOT NULL, seconds TEXT NOT NULL);
CREATE INDEX events_by_round ON events (round, id);
""",
    """
ALTER TABLE events ADD COLUMN certified INTEGER NOT NULL DEFAULT 0;
UPDATE events SET certified = 1 WHERE status = 'committed';
DROP INDEX events_by_round;
CREATE INDEX certified_events ON events (round, id) WHERE certified;
CREATE INDEX events_by_status ON events (status, id);
""",
)
SCHEMA_VERSION = len(_STEPS)
POINT_COLUMNS = tuple(field.name for field in fields(CurvePoint))
EVENT_COLUMNS = tuple(field.name for field in fields(RoundEvent))


class History:
    """One run's history; safe to use from several threads.

    Args:
        path: created if it is missing.
        read_only: never changes it.

    Raises:
        UserError: it is no history, one of a newer Atoll, or it cannot be opened.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path = path
        self._lock, self._reading, self._shortened = threading.Lock(), threading.Lock(), 0
        try:
            self._db = self._connect("ro" if read_only else "rwc")
            self._prepare(read_only)
            self._reader = self._connect("ro")  # so that no question waits until the disk has taken what is written
        except sqlite3.Error as error:
            what = f"{path}: cannot be opened as a history: {error}"
            raise UserError(what, "move it away, or check the disk") from None

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self._path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None)

    def _prepare(self, read_only: bool) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise UserError(
                f"{self._path}: a history of version {version}; this Atoll reads {SCHEMA_VERSION}", "update Atoll"
            )
        if read_only:
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # after a power failure the newest seconds may be missing
        for number, step in enumerate(_STEPS[version:], version + 1):
            self._db.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT;")
        for table in ("points", "events", "names"):
            self._thin(table)

    def close(self) -> None:
        with self._lock, self._reading:
            self._db.close()
            self._reader.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, point: CurvePoint, events: Iterable[RoundEvent], names: Mapping[str, str]) -> None:
        """Keep the figures of a moment, and events; one that is known is replaced where it has more words now.

        Raises:
            OSError: the disk refuses.
        """
        marks = ",".join("?" * len(POINT_COLUMNS))
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute(f"INSERT OR REPLACE INTO points VALUES ({marks})", astuple(point))
                self._name(names, point.time)
                for event in events:
                    self._put(event)
                self._db.execute("COMMIT")
                self._shorten()
                for table in ("points", "events", "names"):
                    self._thin(table)
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise OSError(f"{self._path}: {error}") from error

    def _name(self, names: Mapping[str, str], seen: float) -> None:
        self._db.executemany(
            "INSERT INTO names (peer_id, nickname, seen) VALUES (?, ?, ?) "
            "ON CONFLICT (peer_id) DO UPDATE SET nickname = excluded.nickname, seen = excluded.seen",
            [(peer_id, nickname, seen) for peer_id, nickname in names.items()],
        )

    def _put(self, event: RoundEvent) -> None:
        self._db.execute(
            f"INSERT INTO events ({','.join(EVENT_COLUMNS)}) VALUES ({','.join('?' * len(EVENT_COLUMNS))}) "
            "ON CONFLICT (key) DO UPDATE SET at = coalesce(excluded.at, at), headline = excluded.headline, "
            "details = excluded.details, teller = excluded.teller, seconds = excluded.seconds, tone = excluded.tone "
            "WHERE excluded.teller != '' OR teller = ''",  # a certificate's own words replace no member's
            _packed(event),
        )
        if not event.teller:
            self._db.execute("UPDATE events SET certified = 1 WHERE key = ?", (event.key,))

    def _thin(self, table: str) -> None:
        """Once a table is full: every second of the older half goes. Names: those that were not seen longest.

        While half of the events are claims of peers without a certificate, only those go.
        """
        limit = {"points": MAX_POINTS, "events": MAX_EVENTS, "names": MAX_NAMES}[table]
        (count,) = self._db.execute(f"SELECT count(*) FROM {table}").fetchone()
        if count <= limit:
            return
        key, order = {"points": ("time", "time"), "events": ("id", "id"), "names": ("id", "seen")}[table]
        among, oldest = "1", limit // 4 if table == "names" else limit // 2
        if table == "events":
            (certified,) = self._db.execute("SELECT count(*) FROM events WHERE certified").fetchone()
            if count - certified > limit // 2:
                among, oldest = "NOT certified", (count - certified) // 2
        every = "" if table == "names" else "WHERE place % 2 = 0"
        older = f"SELECT {key}, row_number() OVER (ORDER BY {order}) AS place FROM {table} WHERE {among}"
        self._db.execute(
            f"DELETE FROM {table} WHERE {key} IN "
            f"(SELECT {key} FROM ({older} ORDER BY {order} LIMIT ?) {every})",
            (oldest,),
        )

    def _shorten(self) -> None:
        """Only the newest events keep their details; those that came since the last time are looked at."""
        (newest,) = self._db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        last = max(0, newest - WITH_DETAILS)
        query = "UPDATE events SET details = '[]' WHERE id > ? AND id <= ? AND details != '[]'"
        self._db.execute(query, (self._shortened, last))
        self._shortened = last

    # -- reading ---------------------------------------------------------------------------------------------------

    def curve(self, most: int, since: float = 0.0) -> dict[str, list[Any]]:
        """Columns of at most so many points, evenly chosen, the newest among them."""
        columns = ", ".join(POINT_COLUMNS)
        rows = self._read(f"SELECT {columns} FROM points WHERE time >= ? ORDER BY time", (since,))
        step = max(1, -(-len(rows) // max(1, most)))
        chosen = rows[(len(rows) - 1) % step :: step] if rows else []
        return {name: [row[place] for row in chosen] for place, name in enumerate(POINT_COLUMNS)}

    def events(self, limit: int, before: int | None = None, status: str | None = None) -> list[dict[str, Any]]:
        """Events as documents, those that were heard of last first.

        Args:
            before: only those with a smaller `id`.
            status: only those.
        """
        where: list[str] = ["1"]
        values: list[Any] = []
        if before is not None:
            where, values = ["id < ?"], [before]
        if status is not None:
            where, values = [*where, "status = ?"], [*values, status]
        query = f"SELECT id, {', '.join(EVENT_COLUMNS)} FROM events WHERE {' AND '.join(where)} ORDER BY id DESC"
        return [_unpacked(row) for row in self._read(f"{query} LIMIT ?", (*values, limit))]

    def named(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The events of these keys, those that were heard of last first."""
        marks = ",".join("?" * len(keys))
        query = f"SELECT id, {', '.join(EVENT_COLUMNS)} FROM events WHERE key IN ({marks}) ORDER BY id DESC"
        return [_unpacked(row) for row in self._read(query, keys)]

    def certified(self, rounds: int) -> list[tuple[int, str]]:
        """Round and lineage id of the newest committed rounds that came from certificates, the newest first."""
        query = "SELECT round, lineage_id FROM events WHERE certified ORDER BY round DESC, id DESC LIMIT ?"
        return self._read(query, (rounds,))

    def names(self) -> dict[str, str]:
        """Nicknames by peer id."""
        return dict(self._read("SELECT peer_id, nickname FROM names", ()))

    def counts(self) -> dict[str, int]:
        """How many points there are, and how many events of each status."""
        points = self._read("SELECT 'points', count(*) FROM points", ())
        return dict(points + self._read("SELECT status, count(*) FROM events GROUP BY status", ()))

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        try:
            with self._reading, closing(self._reader.execute(query, values)) as found:
                return found.fetchall()
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error


def _packed(event: RoundEvent) -> tuple[Any, ...]:
    document = asdict(event)
    for name in ("details", "members", "seconds"):
        document[name] = json.dumps(document[name], separators=(",", ":"))
    return tuple(document[name] for name in EVENT_COLUMNS)


def _unpacked(row: Sequence[Any]) -> dict[str, Any]:
    document = dict(zip(("id", *EVENT_COLUMNS), row, strict=True))
    for name in ("details", "members", "seconds"):
        document[name] = json.loads(document[name])
    return document
