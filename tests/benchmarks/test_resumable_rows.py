"""Benchmarks that are measured in several sessions, and the committed reports as rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import attacks_report, exchange_report, links_report, state_transfer_report
from benchmarks.figures import ResumableRows, documents, row_from
from peer.errors import UserError

UNDER = {"seed": 17, "repeats": 5}
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@dataclass(frozen=True, kw_only=True)
class Measured:
    system: str
    peers: int
    seconds: tuple[float, ...]


ROW = Measured(system="atoll", peers=4, seconds=(2.0, 3.0))


def test_a_row_is_taken_over_where_all_that_matters_is_the_same(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    first = ResumableRows(Measured, path, UNDER)
    assert first.find(system="atoll", peers=4) is None
    assert first.keep(ROW) is ROW
    assert first.note() == ""
    again = ResumableRows(Measured, path, UNDER)
    assert again.find(system="atoll", peers=4) == ROW
    assert again.find(system="atoll", peers=8) is None
    again.keep(other := Measured(system="other", peers=4, seconds=()))
    assert again.find(system="other") is other
    assert again.find(system="atoll") == ROW
    assert again.note() == "Rows measured in an earlier session (`--resume`): 1."  # once, and none of this one
    assert ResumableRows(Measured, path, {**UNDER, "repeats": 3}).rows == []


@pytest.mark.parametrize(
    "text", ['{"benchmark": "exchange"}', '{"under": {"seed": 17, "repeats": 5}, "row": {"system": "atoll"}}', "?"]
)
def test_another_file_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a file that this benchmark wrote"):
        ResumableRows(Measured, path, UNDER)


def test_without_a_file_rows_are_kept_for_the_session() -> None:
    rows = ResumableRows(Measured, None, UNDER)
    assert rows.find(system="atoll") is None
    assert rows.keep(ROW) is ROW
    assert rows.find(system="atoll") is ROW
    assert rows.note() == ""


@pytest.mark.parametrize(
    ("name", "kind", "figures"),
    [
        ("attacks", attacks_report.AttackRow, attacks_report.figures),
        ("exchange", exchange_report.ExchangeRow, exchange_report.figures),
        ("links", links_report.LinkRow, links_report.figures),
        ("state_transfer", state_transfer_report.StateRow, state_transfer_report.figures),
    ],
)
def test_a_committed_report_is_read_to_the_same_rows_and_figures(name: str, kind: type, figures) -> None:
    report = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [row_from(kind, document) for document in report["rows"]]
    assert json.loads(json.dumps(documents(rows))) == report["rows"]
    assert [figure.value for figure in figures(rows)] == [figure["value"] for figure in report["figures"]]
