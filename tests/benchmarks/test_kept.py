"""Benchmarks that are measured in several sittings."""

from __future__ import annotations

import pytest

from benchmarks.kept import KeptRows
from peer.errors import UserError

UNDER = {"seed": 17, "repeats": 5}
WHICH = {"system": "atoll", "peers": 4}
MEASURED = {**WHICH, "seconds": [2.0, 3.0]}


def test_a_row_is_taken_over_where_all_that_matters_is_the_same(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    assert KeptRows(path, UNDER).of(WHICH) is None
    assert KeptRows(path, UNDER).keep(MEASURED) is MEASURED
    assert KeptRows(path, UNDER).of(WHICH) == MEASURED
    assert KeptRows(path, UNDER).of({**WHICH, "peers": 8}) is None
    assert KeptRows(path, UNDER).of({**WHICH, "codec": "int8"}) is None
    assert KeptRows(path, {**UNDER, "repeats": 3}).of(WHICH) is None


def test_another_file_is_refused(tmp_path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"benchmark": "exchange"}')
    with pytest.raises(UserError, match="not a file that this benchmark wrote"):
        KeptRows(path, UNDER)


def test_without_a_file_nothing_is_kept() -> None:
    kept = KeptRows(None, UNDER)
    kept.keep(MEASURED)
    assert kept.of(WHICH) is None
