"""The report of the attacks on the aggregator of open runs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import table
from benchmarks.attacks_report import AttackRow, figures, judged, report_of
from benchmarks.figures import ResumableRows
from peer.errors import UserError


def row(attack: str, aggregator: str, seed: int, loss: float | None, drops: int = 0, bad: int = 0):
    own = AttackRow(
        attack=attack, aggregator=aggregator, seed=seed, rounds=60, steps_per_round=5, val_loss=loss,
        honest_contributions=1000, honest_drops=drops, bad_contributions=bad, bad_drops=bad // 2,
    )  # fmt: skip
    return judged(own, replace(own, val_loss=2.0))


MACHINE = {
    "cores": 2, "cpu": "any", "memory_gb": 4.0, "load_average_1_min": 0.5, "python": "3.11", "torch": "2",
}  # fmt: skip
ROWS = (
    row("none", "mean", 0, 2.0), row("absent", "mean", 0, 2.01), row("none", "gated", 0, 1.99),
    row("zero", "gated", 0, 2.02, drops=4, bad=100), row("zero", "gated", 1, 2.06, drops=9, bad=100),
    row("nan", "gated", 1, None),
)  # fmt: skip


def test_a_run_passes_within_two_percent_of_clean_and_with_few_honest_drops():
    assert [one.passed for one in ROWS[3:]] == [True, False, False]
    assert not row("zero", "gated", 0, 2.0, drops=10).passed


def test_the_figures_are_the_worst_of_the_attacked_beside_those_without_byzantine_peers():
    found = {figure.name: figure for figure in figures(ROWS)}
    worst = found["attacked, gated: loss above clean, worst"]
    assert (worst.value, worst.met) == (pytest.approx(3.0), False)
    assert found["Byzantine peers absent, plain mean: loss above clean, worst"].value == pytest.approx(0.5)
    assert found["no attack, gated: loss above clean, mean"].value == pytest.approx(-0.5)
    assert found["honest contributions dropped, worst"].value == pytest.approx(0.9)
    assert (found["of 3 attacked runs, failed"].value, found["of 3 attacked runs, failed"].met) == (2, False)


def test_the_report_grows_run_by_run_and_is_taken_up_again(tmp_path):
    path = tmp_path / "attacks.json"
    written = partial(report_of, machine=MACHINE, options=("--rounds", "60"), setting={"bad": 4})
    rows = ResumableRows(AttackRow, path, report=written)
    for one in ROWS:
        rows.keep(one)
    again = ResumableRows(AttackRow, path, report=written)
    assert again.find(attack="zero", seed=1, steps_per_round=5) == ROWS[4]
    assert again.find(attack="zero", seed=1, steps_per_round=10) is None
    report = json.loads(path.read_text())
    assert report["command"] == "python -m benchmarks.attacks --rounds 60"
    page = table.page({"attacks": report})
    assert "| zero | gated | 2.0200 (+1.0%) | 2.0600 (+3.0%) | 0.65% | 50% |" in page
    assert "| nan | gated | - | no number | 0.00% | - |" in page


def test_a_report_of_something_else_is_refused(tmp_path):
    path = tmp_path / "attacks.json"
    path.write_text('{"rows": [{"attack": "zero"}]}')
    with pytest.raises(UserError, match=r"--report=.*attacks.json: not a file that this benchmark wrote"):
        ResumableRows(AttackRow, path, report=partial(report_of, machine=MACHINE, options=(), setting={}))
