"""The history of a run survives restarts, stays within its bounds, and refuses what it cannot read."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace

import pytest

from peer.errors import UserError
from peer.explain import history
from peer.explain.history import FILE_NAME, SCHEMA_VERSION, History
from peer.explain.swarm_state import CurvePoint, RoundEvent

POINT = CurvePoint(
    time=100.0, round=3, tokens=5000, peers=2, tokens_per_s=12.5, loss=2.5, validation=None, validated=None,
    utilisation=0.9,
)  # fmt: skip
EVENT = RoundEvent(
    key="3/aa", round=3, at=99.0, status="committed", tone="good", headline="committed with alpha and bravo",
    details=("weights",), teller="A", members=("A", "B"), tokens=640, lineage_id="a" * 64,
    seconds={"match": 0.1, "total": 0.3},
)  # fmt: skip


def points(count, start=0):
    return [replace(POINT, time=100.0 + place, tokens=place) for place in range(start, start + count)]


@pytest.fixture
def kept(tmp_path):
    opened = History(tmp_path / FILE_NAME)
    yield opened
    opened.close()


def again(kept, tmp_path):
    kept.close()
    return History(tmp_path / FILE_NAME)


def test_points_events_and_names_survive_a_restart(kept, tmp_path):
    kept.add(POINT, [EVENT], {"A": "alpha", "B": "bravo"})
    reopened = again(kept, tmp_path)
    assert reopened.curve(10) == {name: [value] for name, value in vars(POINT).items()}
    (row,) = reopened.events(10)
    assert {key: row[key] for key in ("round", "headline", "details", "members", "seconds")} == {
        "round": 3, "headline": EVENT.headline, "details": ["weights"], "members": ["A", "B"],
        "seconds": {"match": 0.1, "total": 0.3},
    }  # fmt: skip
    assert reopened.names() == {"A": "alpha", "B": "bravo"}
    assert reopened.counts() == {"points": 1, "committed": 1}


def test_a_crash_in_the_middle_loses_nothing_that_was_added(kept, tmp_path):
    kept.add(POINT, [EVENT], {})
    crashed = History(tmp_path / FILE_NAME)  # beside the first, as a reader of WAL is
    assert len(crashed.events(10)) == 1
    kept.add(replace(POINT, time=105.0), [], {})
    assert crashed.counts()["points"] == 2


def test_an_event_with_more_words_replaces_the_one_before_and_a_certificate_does_not(kept):
    certificate = replace(EVENT, headline="committed", details=(), teller="", seconds={}, at=None)
    kept.add(POINT, [certificate], {})
    assert kept.events(1)[0]["headline"] == "committed"
    kept.add(POINT, [EVENT], {})
    kept.add(POINT, [certificate], {})
    (row,) = kept.events(10)
    assert (row["headline"], row["at"], row["teller"]) == (EVENT.headline, 99.0, "A")


def test_pages_of_events_and_those_of_one_kind(kept):
    events = [replace(EVENT, key=str(n), round=n, status="aborted" if n % 3 == 0 else "committed") for n in range(10)]
    kept.add(POINT, events, {})
    first = kept.events(4)
    assert [row["round"] for row in first] == [9, 8, 7, 6]
    assert [row["round"] for row in kept.events(4, before=first[-1]["id"])] == [5, 4, 3, 2]
    assert [row["round"] for row in kept.events(10, status="aborted")] == [9, 6, 3, 0]
    assert [row["round"] for row in kept.named(["2", "7", "none"])] == [7, 2]


def test_a_curve_has_so_many_points_at_most_and_ends_with_the_newest(kept):
    for point in points(100):
        kept.add(point, [], {})
    curve = kept.curve(30)
    assert len(curve["time"]) == 25
    assert curve["tokens"][-1] == 99
    assert kept.curve(1000, since=190.0)["tokens"] == list(range(90, 100))


def test_the_older_half_is_thinned_out_and_the_newer_one_stays(kept, monkeypatch):
    monkeypatch.setattr(history, "MAX_POINTS", 100)
    monkeypatch.setattr(history, "MAX_EVENTS", 100)
    monkeypatch.setattr(history, "WITH_DETAILS", 20)
    for place, point in enumerate(points(1000)):
        kept.add(point, [replace(EVENT, key=str(place), round=place)], {})
    times = kept.curve(1000)["tokens"]
    assert 75 <= len(times) <= 100
    assert times[-50:] == list(range(950, 1000))
    assert times[0] < 900
    rows = kept.events(200)
    assert 75 <= len(rows) <= 100
    assert [row["round"] for row in rows[:50]] == list(range(999, 949, -1))
    assert rows[0]["details"] == ["weights"]
    assert rows[-1]["details"] == []


def test_names_of_strangers_are_bounded(kept, monkeypatch):
    monkeypatch.setattr(history, "MAX_NAMES", 40)
    for place, point in enumerate(points(100)):
        kept.add(point, [], {f"p{place}": "x", "alpha": "alpha"})
    assert len(kept.names()) <= 40
    assert kept.names()["alpha"] == "alpha"


def test_what_is_no_history_of_this_version_is_refused(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text("no database at all, but longer than a header is, so that SQLite looks at it" * 20)
    with pytest.raises(UserError, match="cannot be opened as a history"):
        History(path)
    path.unlink()
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    newer.close()
    with pytest.raises(UserError, match=f"a history of version {SCHEMA_VERSION + 1}"):
        History(path)
    with pytest.raises(UserError, match="cannot be opened"):
        History(tmp_path / "nowhere" / FILE_NAME, read_only=True)


def test_a_reader_changes_nothing(kept, tmp_path):
    kept.add(POINT, [], {})
    reader = History(tmp_path / FILE_NAME, read_only=True)
    with pytest.raises(OSError, match="readonly"):
        reader.add(replace(POINT, time=1.0), [], {})
    assert reader.counts()["points"] == 1


def test_a_disk_that_refuses_leaves_what_was_there(kept):
    kept.add(POINT, [], {})
    with pytest.raises(OSError, match=r"history\.sqlite"):
        kept.add(replace(POINT, time=7.0), [replace(EVENT, headline=None)], {})  # type: ignore[arg-type]
    assert kept.counts() == {"points": 1}


def test_threads_share_it(kept):
    def add(start):
        for point in points(20, start):
            kept.add(point, [], {})

    threads = [threading.Thread(target=add, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.counts()["points"] == 60


def test_rounds_with_a_certificate_are_known_apart_from_those_that_peers_claim(kept):
    kept.add(POINT, [EVENT, replace(EVENT, key="9/bb", round=9)], {})
    assert kept.certified(10) == []
    kept.add(POINT, [replace(EVENT, teller=""), replace(EVENT, key="4/cc", round=4, teller="")], {})
    assert kept.certified(10) == [(4, "a" * 64), (3, "a" * 64)]
    assert kept.named(["3/aa"])[0]["teller"] == "A"


def test_claims_of_peers_never_crowd_out_certified_rounds(kept, monkeypatch):
    monkeypatch.setattr(history, "MAX_EVENTS", 100)
    kept.add(POINT, [replace(EVENT, key=f"c{n}", round=n, teller="") for n in range(40)], {})
    for n in range(500):
        kept.add(POINT, [replace(EVENT, key=f"a{n}", status="aborted")], {})
    assert kept.counts() | {"points": 0} == {"points": 0, "committed": 40, "aborted": kept.counts()["aborted"]}
    assert sum(kept.counts().values()) <= 102


def test_old_events_lose_their_details_long_before_the_file_is_full(kept, monkeypatch):
    monkeypatch.setattr(history, "WITH_DETAILS", 20)
    for place, point in enumerate(points(50)):
        kept.add(point, [replace(EVENT, key=str(place), round=place)], {})
    assert [bool(row["details"]) for row in kept.events(60)] == [True] * 20 + [False] * 30


def test_no_question_waits_for_a_disk_that_takes_its_time(kept, tmp_path):
    kept.add(POINT, [EVENT], {})
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = threading.Thread(target=kept.add, args=(replace(POINT, time=107.0), [], {}))
    writing.start()
    while not kept._lock.locked():
        pass
    assert len(kept.events(10)) == 1
    assert writing.is_alive()
    other.execute("ROLLBACK")
    writing.join()
    assert kept.counts()["points"] == 2


def test_a_question_that_the_disk_does_not_answer_is_an_error_of_the_system(kept):
    kept.add(POINT, [EVENT], {})
    kept._db.execute("DROP TABLE events")
    with pytest.raises(OSError, match=r"history\.sqlite: no such table"):
        kept.events(1)


def test_a_history_of_the_version_before_is_taken_over(tmp_path):
    old = sqlite3.connect(tmp_path / FILE_NAME)
    old.executescript(f"{history._STEPS[0]} PRAGMA user_version = 1;")
    old.execute(
        "INSERT INTO events VALUES (1, '3/aa', 3, 9.0, 'committed', 'good', '', '[]', 'A', '[]', 640, ?, '{}')",
        ("a" * 64,),
    )
    old.commit()
    old.close()
    opened = History(tmp_path / FILE_NAME)
    assert opened.certified(5) == [(3, "a" * 64)]
    opened.add(POINT, [replace(EVENT, key="4/bb", round=4, teller="")], {})
    assert [row["round"] for row in opened.events(5)] == [4, 3]
