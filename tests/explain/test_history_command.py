"""What `atoll history export` writes, and what it says where there is nothing to write."""

from __future__ import annotations

import csv
from dataclasses import replace

import pyarrow.parquet
import pytest

from peer.cli import main
from peer.explain.history import FILE_NAME, History
from tests.explain.test_history import EVENT, POINT, points


@pytest.fixture
def state_dir(tmp_path):
    folder = tmp_path / "bootstrap" / "history" / "0123456789abcdef"
    folder.mkdir(parents=True)
    history = History(folder / FILE_NAME)
    for point in points(3):
        history.add(point, [], {"A": "alpha"})
    history.add(POINT, [EVENT, replace(EVENT, key="4", round=4, status="aborted", headline="=1+1")], {"B": "bravo"})
    yield tmp_path / "bootstrap"  # open, as while the bootstrap runs
    history.close()


def export(*argv):
    with pytest.raises(SystemExit) as ended:
        main(["history", "export", *map(str, argv)])
    return ended.value.code


def test_parquet_with_types_and_lists(state_dir, tmp_path, capsys):
    assert export(state_dir, "--out", tmp_path / "out") == 0
    assert capsys.readouterr().out == f"{tmp_path}/out/points.parquet: 3 rows\n{tmp_path}/out/rounds.parquet: 2 rows\n"
    table = pyarrow.parquet.read_table(tmp_path / "out" / "points.parquet").to_pydict()
    assert table["time"] == [100.0, 101.0, 102.0]
    assert table["loss"] == [2.5, 2.5, 2.5]
    rounds = pyarrow.parquet.read_table(tmp_path / "out" / "rounds.parquet").to_pylist()
    assert [(row["round"], row["status"], row["seconds"]) for row in rounds] == [
        (3, "committed", 0.3), (4, "aborted", 0.3),
    ]  # fmt: skip
    assert (rounds[0]["members"], rounds[0]["member_ids"]) == (["alpha", "bravo"], ["A", "B"])
    assert (rounds[0]["teller"], rounds[0]["teller_id"]) == ("alpha", "A")


def test_csv_for_spreadsheets(state_dir, tmp_path):
    assert export(state_dir, "--format", "csv", "--out", tmp_path) == 0
    with (tmp_path / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["members"] for row in rows] == ["alpha; bravo"] * 2
    assert [row["headline"] for row in rows] == ["committed with alpha and bravo", "'=1+1"]


def test_a_file_can_be_named_too(state_dir, tmp_path):
    (path,) = state_dir.rglob(FILE_NAME)
    assert export(path, "--out", tmp_path, "--format", "csv") == 0
    assert (tmp_path / "points.csv").read_text().startswith("time,round,tokens,peers,")


def test_nothing_and_several_are_said(state_dir, tmp_path, capsys):
    assert export(tmp_path / "nowhere") == 2
    assert "nowhere: no history" in capsys.readouterr().err
    other = state_dir / "history" / "fedcba9876543210"
    other.mkdir()
    History(other / FILE_NAME).close()
    assert export(state_dir) == 2
    assert "2 runs have a history" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(state_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert export(state_dir, "--out", tmp_path / "file") == 2
    assert "points.parquet: cannot be written" in capsys.readouterr().err
