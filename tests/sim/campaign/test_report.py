"""Rows, their gaps, their means; what a resumed campaign keeps; the pictures."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from peer.errors import UserError
from peer.sim.campaign.report import CampaignReport, read_report
from peer.sim.cli.plots import draw, mean_lines
from peer.sim.cli.tables import result_table, simulator_console

SETTINGS = {"peers": 4, "tokens": 100, "network": {"name": "ideal", "digest": "0"}}


def row(label, seed, loss, status="ok", settings="a", curve=None):
    return {
        "label": label, "recipe": label.partition(":")[0], "seed": seed, "settings": settings, "steps_per_round": 1,
        "val_loss": loss, "bytes_sent_per_peer": 1e6, "reduction_vs_ddp": 1.0, "virtual_seconds": 10.0,
        "utilization": 1.0, "wall_seconds": 0.1, "status": status, "note": None if status == "ok" else status,
        "curve": curve or [],
    }


def point(tokens, num_bytes, loss):
    return {"tokens": tokens, "bytes_sent_per_peer": num_bytes, "virtual_seconds": 0.0, "val_loss": loss}


def report(*rows, labels=("ddp", "diloco"), seeds=(0, 1), settings=SETTINGS, baselines=("ddp", "ddp:muon")):
    made = CampaignReport(
        command="atoll compare", task={"parameters": 7}, settings=settings, labels=labels, seeds=seeds,
        baselines=baselines,
    )
    for one in rows:
        made.add(one)
    return made


def test_the_gap_is_to_the_reference_of_the_same_seed():
    rows = report(row("diloco", 1, 2.2), row("ddp", 0, 4.0), row("diloco", 0, 3.0), row("ddp", 1, 2.0)).rows()
    assert [(one["label"], one["seed"]) for one in rows] == [("ddp", 0), ("ddp", 1), ("diloco", 0), ("diloco", 1)]
    assert [one["gap"] for one in rows] == pytest.approx([0.0, 0.0, -0.25, 0.1])


def test_the_gap_is_to_the_baseline_with_the_lowest_mean_of_the_seeds_that_all_of_them_have():
    made = report(
        row("ddp", 0, 4.0), row("ddp", 1, 2.0), row("ddp:muon", 0, 3.0), row("diloco", 0, 3.0), row("diloco", 1, 2.0)
    )
    assert made.best_baseline() == "ddp:muon"
    assert [one["gap"] for one in made.rows() if one["label"] == "diloco"] == [0.0, None]
    made.add(row("ddp:muon", 1, 3.5))
    assert made.document()["best_baseline"] == "ddp"
    assert [one["gap"] for one in made.rows() if one["label"] == "diloco"] == [-0.25, 0.0]
    assert report(row("diloco", 0, 3.0), baselines=()).best_baseline() is None


def test_the_summary_has_means_and_sample_deviations_over_the_seeds_that_finished():
    made = report(row("ddp", 0, 2.0), row("ddp", 1, 4.0), row("diloco", 0, 2.5), row("diloco", 1, None, "diverged"))
    ddp, diloco = made.summary()
    assert (ddp["val_loss"], ddp["val_loss_std"], ddp["failures"]) == (3.0, statistics.stdev([2.0, 4.0]), 0)
    assert (diloco["val_loss"], diloco["val_loss_std"], diloco["failures"]) == (2.5, None, 1)
    assert diloco["notes"] == ["diverged"]
    assert diloco["gap"] == pytest.approx(0.25)


def test_a_report_is_complete_when_every_label_has_every_seed():
    made = report(row("ddp", 0, 2.0), row("ddp", 1, 4.0), row("diloco", 0, 2.5))
    assert not made.document()["complete"]
    made.add(row("diloco", 1, None, "diverged"))
    assert made.document()["complete"]


def test_a_written_report_is_json_without_nan_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "r.json"
    report(row("ddp", 0, 2.0), row("diloco", 0, None, "diverged")).write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    document = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert [one["gap"] for one in document["rows"]] == [0.0, None]
    with pytest.raises(UserError, match="cannot be written"):
        report().write(tmp_path / "missing" / "r.json")


def test_resuming_keeps_finished_runs_of_the_same_recipe_and_repeats_failed_ones(tmp_path):
    path = tmp_path / "r.json"
    report(row("ddp", 0, 2.0), row("ddp", 1, None, "failed"), row("papa", 0, 2.1), row("diloco", 0, None, "diverged"),
           labels=("ddp", "papa", "diloco")).write(path)
    resumed = report(labels=("ddp", "diloco"))
    assert resumed.take_over(path) == 4
    assert resumed.has("ddp", 0, "a")
    assert not resumed.has("ddp", 0, "b")       # the recipe's numbers are others now
    assert not resumed.has("ddp", 1, "a")
    assert resumed.has("diloco", 0, "a")        # it would diverge again
    assert [one["label"] for one in resumed.summary()] == ["ddp", "diloco", "papa"]


def test_resuming_refuses_rows_that_were_made_with_other_settings(tmp_path):
    path = tmp_path / "r.json"
    report(row("ddp", 0, 2.0)).write(path)
    with pytest.raises(UserError, match="tokens 100 there, 200 now"):
        report(settings=SETTINGS | {"tokens": 200}).take_over(path)
    with pytest.raises(UserError, match="network ideal there, home now"):
        report(settings=SETTINGS | {"network": {"name": "home", "digest": "1"}}).take_over(path)


@pytest.mark.parametrize("text", ["", "[1", "[]", "{}", '{"rows": []}'])
def test_something_else_is_no_report(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.json"):
        read_report(path)


def test_lines_are_means_over_seeds_without_points_that_have_no_place_or_no_loss():
    curves = {
        ("ddp", 0): [point(0, 0.0, 5.0), point(10, 100.0, 4.0), point(20, 200.0, 3.0)],
        ("ddp", 1): [point(0, 0.0, 6.0), point(10, 100.0, 5.0), point(20, 200.0, 4.0)],
        ("diloco", 0): [point(0, 0.0, 5.0), point(10, 10.0, None), point(20, 20.0, 2.0)],
        ("papa", 0): [],
    }
    rows = [
        row(label, seed, curve[-1]["val_loss"] if curve else None, curve=curve)
        for (label, seed), curve in curves.items()
    ]
    by_tokens = mean_lines(rows, "tokens")
    assert [(line.label, line.final) for line in by_tokens] == [("diloco", 2.0), ("ddp", 3.5)]
    assert by_tokens[1].x == (0, 10, 20)
    assert by_tokens[1].losses == (5.5, 4.5, 3.5)
    assert by_tokens[0].x == (0, 20)
    by_bytes = {line.label: line.x for line in mean_lines(rows, "bytes_sent_per_peer")}
    assert by_bytes == {"ddp": (100, 200), "diloco": (20,)}     # a logarithm has no 0


@pytest.mark.parametrize("axis", ["tokens", "bytes_sent_per_peer"])
def test_pictures_of_thirty_recipes_of_none_and_of_a_diverging_one(tmp_path, axis):
    many = [
        row(f"r{n}", 0, 2.0 + n / 10, curve=[point(t, t * 2.0**n, 5.0 - t / 50 + n / 10) for t in range(0, 101, 10)])
        for n in range(30)
    ]
    broken = row("x", 0, None, "diverged", curve=[point(0, 0.0, 5.0), point(10, 9.0, 1e30), point(20, 10.0, None)])
    for name, rows in (("none", []), ("many", [*many, broken])):
        document = report(*rows, labels=[one["label"] for one in rows]).document()
        draw(tmp_path / f"{name}.png", document, axis)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        draw(tmp_path / "missing" / "a.png", document, axis)


def test_the_table_shows_what_failed_and_why(capsys):
    made = report(row("ddp", 0, 2.0), row("diloco", 0, None, "diverged: the loss is nan"))
    simulator_console().print(result_table(made.summary(), "title"))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ddp ") and "2.0000" in line and "+0.00%" in line for line in lines)
    assert any("diverged: the loss is nan" in line for line in lines)


def test_a_loss_that_is_no_number_becomes_null_with_a_note():
    from peer.outer.recipe.published import RECIPES
    from peer.protocol.manifest import InnerSpec
    from peer.sim.campaign.job import row_of
    from peer.sim.campaign.plan import Job, build_swarm, load_task

    swarm = build_swarm(load_task(None), network="ideal", peers=1, tokens=None, step_s=1.0, evaluations=1)
    job = Job(label="ddp", recipe=RECIPES["ddp"], inner=InnerSpec(), seed=0, swarm=swarm)
    made = row_of(job, {"val_loss": math.nan, "curve": ({"val_loss": math.inf},), "recipe": "ddp", "seed": 0})
    assert (made["val_loss"], made["curve"], made["status"]) == (None, [{"val_loss": None}], "diverged")
    assert made["note"] == "diverged: the loss is nan"
