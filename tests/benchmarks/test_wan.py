"""What is made of measured lines and losses: rates, goals, pictures. The measurements are real swarms of minutes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import losses
from benchmarks.losses import LossRow
from benchmarks.wan import Case, Machines, cases, manifest_of, report_of
from benchmarks.wan_report import WanRow, draw, figures, line, peak_mbit
from peer.errors import UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import parse_manifest

EVEN = tuple((0.5 * index, 50_000.0 * index) for index in range(21))  # .8 Mbit/s
BURST = (*((0.5 * index, 0.0) for index in range(10)), *((0.5 * index, 1e6) for index in range(10, 21)))


def row(recipe: str, mbit: float = 2.0, **changes: object) -> WanRow:
    own = {"waits": False, "slow": False, "computing": (99.5, 99.0, 98.0, 100.0), "peak_mbit": 1.0, "rounds": 3}
    return WanRow(
        recipe=recipe, mbit=mbit, members=4.0, bytes_a_round=1.5e6, window_s=2.5, load_average_1_min=1.0,
        sent=EVEN, **{**own, **changes},
    )  # fmt: skip


def test_a_peak_is_the_rate_of_the_busiest_window() -> None:
    assert round(peak_mbit(EVEN, 2.5), 9) == 0.8
    assert peak_mbit(BURST, 2.5) == 3.2
    assert peak_mbit(BURST, 0.5) == 16.0


def test_goals_are_those_of_the_lines_and_the_peak_is_compared_on_the_fast_one() -> None:
    rows = [
        row("diloco", waits=True), row("diloco"), row("lagoon", slow=True, computing=(96.0, 94.0, 97.0, 10.0)),
        row("ddp"), row("diloco", 20.0, peak_mbit=4.0), row("streaming-diloco", 20.0, peak_mbit=1.3),
    ]  # fmt: skip
    found = {figure.name: figure for figure in figures(rows, 4)}
    assert found["diloco, waiting, 2 Mbit/s: computing"].met is None
    assert found["ddp, 2 Mbit/s: computing"].met is None
    assert found["diloco, 2 Mbit/s: computing"].met is True  # the median
    slow = found["lagoon, one slow peer: least of the others"]
    assert (slow.value, slow.met) == (94.0, False)
    peak = found["peak of streaming-diloco over diloco's, in 2.5 s"]
    assert (round(peak.value, 3), peak.limit, peak.met) == (32.5, 30.0, False)
    assert round(found["peak of streaming-diloco over diloco's, between two looks"].value, 3) == 100.0
    rows[4] = row("diloco", 20.0, peak_mbit=0.1, rounds=0)  # it sent nothing that could be compared
    assert not [figure for figure in figures(rows, 4) if "peak" in figure.name]
    assert line(rows[2])[:5] == ("lagoon", "2", "yes", "95.0%", "10.0%")


def test_a_row_begins_with_a_round_that_all_are_in(tmp_path: Path) -> None:
    """Two branches of two peers each have rounds as well."""
    machines = Machines(tmp_path, internet=None)
    committed = {"event": "round", "status": "committed"}
    histories = [[2, 2], [2, 4], [4]], [[2, 2], [2, 2], [2, 2]], [[2, 4], [2, 3], [2, 4]]
    for members in (*histories, [[2, 4], [4, 4], [2, 2, 4]]):
        for index, sizes in enumerate(members):
            (tmp_path / f"peer{index}").mkdir(exist_ok=True)
            rounds = (json.dumps({**committed, "members": ["x"] * size}) for size in sizes)
            (tmp_path / f"peer{index}" / "metrics.jsonl").write_text("\n".join(rounds) + "\n")
        if members in histories:
            with pytest.raises(UserError, match="the peers made no 2 rounds of 4 within 0 s"):
                machines.await_rounds(3, timeout_s=0.0, together=4)
        machines.await_rounds(2 if members[2] == [4] else 3, timeout_s=0.0)
    machines.await_rounds(3, timeout_s=0.0, together=4)


def test_a_row_without_a_round_is_named() -> None:
    arguments = Namespace(recipes=["diloco"], seconds=30, seed=0)
    notes = report_of([row("diloco", 20.0, rounds=0), row("lagoon")], [], arguments).notes
    assert notes.endswith("The first peer was in no round within the time: diloco on 20 Mbit/s.")


def test_the_picture_has_a_panel_for_each_line_without_a_slow_peer(tmp_path: Path) -> None:
    draw(tmp_path / "wan.png", [row("diloco"), row("lagoon", slow=True), row("streaming-diloco", 20.0)])
    assert (tmp_path / "wan.png").read_bytes()[:4] == b"\x89PNG"


def test_every_case_has_a_manifest_that_a_swarm_runs() -> None:
    found = cases(["diloco", "streaming-diloco", "lagoon"])
    assert [(case.recipe, case.waits, case.slow, case.mbit) for case in found] == [
        ("diloco", True, False, 2.0), ("diloco", False, False, 2.0), ("streaming-diloco", False, False, 2.0),
        ("lagoon", False, False, 2.0), ("diloco", False, True, 2.0), ("streaming-diloco", False, True, 2.0),
        ("lagoon", False, True, 2.0), ("diloco", False, False, 20.0), ("streaming-diloco", False, False, 20.0),
    ]  # fmt: skip
    (shared,) = cases(["ddp"])
    assert (shared.mbit, shared.loss, shared.slow) == (16.0, 0.0, False)
    for name, fragments in (("diloco", 1), ("streaming-diloco", 4), ("lagoon", 1), ("ddp", 1)):
        plan = RunPlan.of(parse_manifest(manifest_of(Case(recipe=name)).encode(), name))
        assert (plan.recipe.name, plan.recipe.num_fragments) == (name, fragments)


def test_the_line_is_ten_times_as_fast_and_the_model_ten_times_as_large() -> None:
    counts = []
    for mbit in (2.0, 20.0):
        manifest = parse_manifest(manifest_of(Case(recipe="diloco", mbit=mbit)).encode(), "wan")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**manifest.model.config))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert counts == [825_472, 8_067_456]


def test_losses_are_compared_with_the_simulator_and_with_blocking_rounds_of_the_same_seed() -> None:
    rows = [
        LossRow(recipe="diloco", seed=1, waits=True, real=2.0, simulated=2.004),
        LossRow(recipe="diloco", seed=2, waits=True, real=3.0, simulated=3.0),
        LossRow(recipe="eager-diloco", seed=1, waits=True, real=2.02, simulated=2.02),
        LossRow(recipe="eager-diloco", seed=2, waits=True, real=3.03, simulated=3.03),
        LossRow(recipe="diloco", seed=1, waits=False, real=1.98, simulated=None),
    ]
    found = {figure.name: round(figure.value, 3) for figure in losses.figures(rows)}
    assert found == {
        "diloco: real from simulated": 0.1, "eager-diloco: real from simulated": 0.0,
        "eager-diloco: above diloco": 1.0, "diloco, going on: above diloco": -1.0,
    }  # fmt: skip
    assert losses.line(rows[0], rows) == ("diloco", "1", "2.0000", "2.0040", "-0.200%", "+0.00%")
    assert losses.line(rows[4], rows) == ("diloco, going on", "1", "1.9800", "-", "-", "-1.00%")
