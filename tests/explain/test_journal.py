"""The journal: what was written comes back, strictly read, across crashes and rotation, also while it grows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.explain.journal import KEEP, MAX_BYTES, JournalReader, RoundJournal, has_rounds
from peer.outer.record import RoundRecord
from peer.telemetry.lines import rotated
from tests.explain.samples import STORY, committed


def journal(folder: Path, records: list[RoundRecord], **limits: int) -> Path:
    file = RoundJournal(folder, **limits)
    for record in records:
        file.append(record)
    file.close()
    return folder / "rounds.jsonl"


def test_every_record_comes_back_as_it_was(tmp_path: Path) -> None:
    journal(tmp_path, STORY)
    found = JournalReader(tmp_path).poll()
    assert found.records == STORY
    assert found.problems == []


def test_no_journal_is_no_records(tmp_path: Path) -> None:
    assert not has_rounds(tmp_path)
    assert JournalReader(tmp_path).poll().records == []


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = journal(tmp_path, STORY[:3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    reader = JournalReader(tmp_path)
    assert reader.poll().records == STORY[:2]
    path.write_bytes(whole)
    assert reader.poll().records == STORY[2:3]
    assert reader.poll().records == []


def test_the_writer_after_a_crash_cuts_the_torn_line_and_nothing_else(tmp_path: Path) -> None:
    path = journal(tmp_path, STORY[:3])
    path.write_bytes(path.read_bytes()[:-20])
    reader = JournalReader(tmp_path)
    reader.poll()
    journal(tmp_path, STORY[3:4])
    assert reader.poll().records == STORY[3:4]
    found = JournalReader(tmp_path).poll()
    assert (found.records, found.problems) == ([*STORY[:2], STORY[3]], [])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json", "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b'{"status":"committed","round":"3","lineage_id":"%s"}' % (b"a" * 64), "round: Input should be a valid int"),
        (b'{"status":"won","round":3,"lineage_id":"%s"}' % (b"a" * 64), "status: Input should be"),
        (b'{"status":"committed","round":3,"lineage_id":"%s","x":1}' % (b"a" * 64), "x: Extra inputs"),
        (b"{}", "status: Field required"),
    ],
)
def test_a_line_that_is_no_record_is_left_out_and_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = journal(tmp_path, STORY[:1])
    path.write_bytes(path.read_bytes() + line + b"\n")
    journal(tmp_path, STORY[1:2])
    found = JournalReader(tmp_path).poll()
    assert found.records == STORY[:2]
    (problem,) = found.problems
    assert problem.startswith(f"rounds.jsonl line 2: not a round record: {why}")


def test_rotation_bounds_the_size_and_a_reader_misses_and_repeats_nothing(tmp_path: Path) -> None:
    records = [committed(number, float(number)) for number in range(10, 50)]
    size = len(records[0].model_dump_json(exclude_defaults=True)) + 1
    reader, seen = JournalReader(tmp_path), []
    for record in records:
        journal(tmp_path, [record], max_bytes=3 * size + 2, keep=2)
        seen += reader.poll().records
    assert seen == records
    left = JournalReader(tmp_path).poll().records
    assert left == records[-len(left) :]
    assert 6 < len(left) <= 9
    assert len(rotated(tmp_path / "rounds.jsonl")) == 2


def test_a_reader_that_looks_rarely_finds_its_place_in_a_rotated_file(tmp_path: Path) -> None:
    records = [committed(number, float(number)) for number in range(10, 18)]
    size = len(records[0].model_dump_json(exclude_defaults=True)) + 1
    reader = JournalReader(tmp_path)
    journal(tmp_path, records[:2], max_bytes=3 * size + 2, keep=2)
    assert reader.poll().records == records[:2]
    journal(tmp_path, records[2:], max_bytes=3 * size + 2, keep=2)
    assert reader.poll().records == records[2:]


def test_a_crash_between_the_two_steps_of_a_rotation_loses_nothing(tmp_path: Path) -> None:
    path = journal(tmp_path, STORY[:3])
    path.rename(tmp_path / "rounds.1.jsonl")
    assert has_rounds(tmp_path)
    assert JournalReader(tmp_path).poll().records == STORY[:3]
    journal(tmp_path, STORY[3:5])
    assert JournalReader(tmp_path).poll().records == STORY[:5]


def test_records_survive_a_kill_of_the_writer(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from peer.explain.journal import RoundJournal; from peer.outer.record import RoundRecord\n"
        "journal = RoundJournal(Path(sys.argv[1]))\n"
        "for number in range(1, 6):\n"
        "    journal.append(RoundRecord(status='committed', round=number, lineage_id='a' * 64))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ}, check=False)
    assert ended.returncode == -9
    assert [record.round for record in JournalReader(tmp_path).poll().records] == [1, 2, 3, 4, 5]


def test_ten_thousand_rounds_of_four_peers_stay(tmp_path: Path) -> None:
    record = committed(99_999, 1.0)
    four = record.model_copy(update={"members": (*record.members, record.members[0]), "weights": (5120,) * 4})
    size = journal(tmp_path, [four]).stat().st_size
    assert KEEP * (MAX_BYTES // size) >= 10_000
