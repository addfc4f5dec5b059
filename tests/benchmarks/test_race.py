"""Races of recipes: who runs, what is kept, which rate is the best, and what a report says of it."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

import pytest

from benchmarks import frontier, scaling, search
from benchmarks import race as race_module
from benchmarks.figures import ResumableRows
from benchmarks.race import Race, RaceRow, draw_gaps, gap, ranking, reference_of, shortest_round
from benchmarks.scaling import with_size
from peer.errors import UserError
from peer.sim.campaign.plan import load_task, meta_layout

LONG = "configs/sim/long.yaml"


def row(label, loss, reduction=1.0, numel=33_696):
    return RaceRow(label=label, numel=numel, peers=4, tokens=1000, seed=0, digest="", scored=1, loss=loss,
                   reduction=reduction, seconds=1.0)  # fmt: skip


class Scripted(Race):
    """A race whose losses are known, to see which runs a search asks for."""

    def __init__(self, loss_of):
        self.loss_of, self.asked, self.rows, self.numel = loss_of, [], [], 33_696

    def steps(self, tokens):
        return tokens // 2048

    def run(self, labels, tokens):  # noqa: ARG002
        self.asked += [label for label in labels if label not in self.asked]
        found = [row(label, self.loss_of(label)) for label in labels]
        self.rows += [one for one in found if one not in self.rows]
        return found


@pytest.fixture
def small():
    return with_size(load_task(LONG), 8, 1)


def test_sizes_are_those_of_their_names():
    numels = {name: meta_layout(with_size(load_task(LONG), *size)).numel for name, size in scaling.SIZES.items()}
    assert numels == {"0.03M": 33_696, "0.1M": 95_952, "0.2M": 215_104, "0.3M": 331_600, "0.8M": 825_472}
    assert meta_layout(load_task(search.TASK)).numel == 215_104
    assert search.TOKENS == scaling.TOKENS_EACH * 215_104


@pytest.mark.parametrize(("compressor", "numel", "reduction", "steps", "length"), [
    ("int2", 215_104, 1000, 5252, 67), ("sign", 215_104, 1000, 5252, 34), ("int4", 215_104, 1000, 5252, 132),
    ("int8", 33_696, 1000, 3072, 256), ("int8", 33_696, 3000, 3072, 768), ("int2", 33_696, 10_000, 3072, 768),
    ("int2", 33_696, 1, 3072, 1),
])  # fmt: skip
def test_a_round_is_as_short_as_its_codec_allows(compressor, numel, reduction, steps, length):
    assert shortest_round(compressor, numel, reduction, steps) == length


def test_a_run_sends_as_little_as_its_round_is_long_for(small):
    race = Race(small, None, 40_960, print)
    length = shortest_round("int8", race.numel, 10, race.steps(40_960))
    (row,) = race.run([f"diloco:steps_per_round={length},compressor=int8"], 40_960)
    assert (race.steps(40_960), length) == (40, 3)
    assert 10.0 <= row.reduction < 12.0


def test_what_ran_is_kept_and_runs_once(small, tmp_path):
    said = []
    path = tmp_path / "rows"
    labels = ["ddp:inner.learning_rate=0.008", "diloco:steps_per_round=2"]

    def race():
        return Race(small, path, 8192, said.append)

    first = race().run([*labels, labels[0]], 8192)
    assert [one.label for one in first] == [*labels, labels[0]]
    assert (len(said), len(path.read_text().splitlines())) == (2, 2)
    assert first[0].reduction == 1.0
    assert 1.9 < first[1].reduction < 2.1
    assert race().run(labels, 8192) == first[:2]
    assert len(said) == 2
    race().run(labels[:1], 4096)
    assert len(said) == 3


def test_a_race_that_keeps_nothing_runs_each_label_once(small):
    said = []
    race = Race(small, None, 8192, said.append)
    first = race.run(["ddp", "ddp"], 4096)
    assert race.run(["ddp"], 4096) == first[:1] == race.rows
    assert len(said) == 1


def test_a_report_names_the_device_of_rows_that_another_machine_measured(small, tmp_path):
    path = tmp_path / "rows"
    first = Race(small, path, 8192, print)
    first.run(["ddp"], 4096)
    assert first.note() == ""
    line = json.loads(path.read_text())
    line["row"]["device"] = "NVIDIA H200"
    path.write_text(json.dumps(line) + "\n")
    later = Race(small, path, 8192, print)
    later.run(["ddp"], 4096)
    assert later.note().splitlines() == [
        "Rows measured in an earlier session (`--resume`): 1.", "Inner steps of 1 rows on NVIDIA H200.",
    ]


def test_what_a_label_cannot_be_is_said_before_anything_runs(small, tmp_path):
    race = Race(small, tmp_path / "rows", 8192, print)
    with pytest.raises(UserError, match="outer_momentum=2"):
        race.run(["ddp:inner.learning_rate=0.008", "diloco:outer_momentum=2"], 8192)
    assert not (tmp_path / "rows").exists()


def rate_of(label):
    return float(label.rsplit("=", 1)[1])


def test_rates_go_on_until_the_best_has_a_worse_one_on_either_side():
    best = {"adamw": 0.001, "muon": 0.06}
    race = Scripted(lambda label: 99.0 + abs(rate_of(label) / best["muon" if "muon" in label else "adamw"] - 1.0))
    assert race.best_inner("ddp:", 1000) == [
        "inner.optimizer=adamw,inner.learning_rate=0.001", "inner.optimizer=muon,inner.learning_rate=0.064",
    ]
    asked = {name: sorted(rate_of(label) for label in race.asked if name in label) for name in best}
    assert asked == {
        "adamw": [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016], "muon": [0.004, 0.008, 0.016, 0.032, 0.064, 0.128],
    }


def test_rates_that_all_diverge_are_an_error():
    with pytest.raises(UserError, match="diverges"):
        Scripted(lambda _: None).best_inner("ddp:", 1000)


def test_an_optimizer_that_is_far_behind_is_not_trained_in_full():
    race = Scripted(lambda label: (2.0 if "muon" in label else 2.07) + abs(rate_of(label) - 0.008))
    assert race.best_inner("ddp:", 1000) == ["inner.optimizer=muon,inner.learning_rate=0.008"]


def test_a_search_keeps_the_better_value_of_each_knob_and_trains_different_parts():
    good = {"muon", "=0.008", "int4", "outer_learning_rate=0.7", "restart", "local.p"}
    race = Scripted(lambda label: 2.0 - 0.1 * sum(word in label for word in good) - 0.1 * ("restart" in label))
    labels = search.descend(race, 1000)
    assert labels[0] == min(race.rows, key=lambda one: one.rank).label == (
        "diloco:steps_per_round=132,compressor=int4,outer_learning_rate=0.7,outer_momentum=0.8,"
        "outer_schedule.restart=8,average=0.75,inner.optimizer=muon,inner.learning_rate=0.008"
    )
    assert "local.p=0.2" in labels[1]
    assert len(labels) == len(set(labels)) == len(search.KNOBS["part"])
    assert len(race.asked) == 6 + 2 + 2 + 5


def test_a_run_in_full_is_scored_on_all_of_the_text(small):
    race = Race(small, None, 8192, print)
    (short,), (full,) = race.run(["ddp"], 4096), race.run(["ddp"], 8192)
    assert short.scored == 65_536 < full.scored


def test_a_row_of_another_model_recipe_or_text_is_not_taken_over(small, tmp_path):
    path, said = tmp_path / "rows", []
    Race(small, path, 4096, said.append).run(["diloco:steps_per_round=2"], 4096)
    other = small.model_copy(update={"inner": small.inner.model_copy(update={"weight_decay": 0.3})})
    Race(other, path, 4096, said.append).run(["diloco:steps_per_round=2"], 4096)
    assert len(said) == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["row"]["digest"] = "another recipe of that name"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    Race(small, path, 4096, said.append).run(["diloco:steps_per_round=2"], 4096)
    assert len(said) == 3


def test_what_failed_is_said_once_the_others_have_ended(small, tmp_path, monkeypatch):
    ended = {"status": "ok", "note": "", "val_loss": 1.0, "reduction_vs_ddp": 1.0, "wall_seconds": 1.0}
    failed = {**ended, "status": "failed", "note": "out of memory"}
    monkeypatch.setattr(race_module, "run_job", lambda job, _: failed if job.recipe.name == "diloco" else ended)
    race = Race(small, tmp_path / "rows", 4096, print)
    with pytest.raises(UserError, match="diloco: out of memory"):
        race.run(["diloco", "ddp"], 4096)
    assert [row.label for row in race.kept.rows] == ["ddp"]


def test_gaps_are_to_the_best_data_parallelism():
    rows = [row("ddp:a=1", 2.0), row("lagoon", 2.05, 1005.0), row("ddp:a=2", 1.9), row("diloco:a=1", None, 30.0)]
    assert gap(rows[1], reference_of(rows)) == pytest.approx(7.8947, abs=1e-4)
    assert list(ranking(rows)) == [
        ("`ddp:a=2`", "1.9000", "+0.00%", "1x"),
        ("`ddp:a=1`", "2.0000", "+5.26%", "1x"),
        ("`lagoon`", "2.0500", "+7.89%", "1,005x"),
        ("`diloco:a=1`", "diverged", "", "30x"),
    ]


def test_each_size_has_the_gap_of_its_best():
    rows = [row("ddp:a=1", 2.0), row("lagoon:a=1", 2.1), row("lagoon:a=2", 2.04),
            row("ddp:a=1", 1.0, numel=9), row("lagoon:a=1", 1.5, numel=9)]  # fmt: skip
    assert scaling.by_size(rows) == pytest.approx({9: 50.0, 33_696: 2.0})


def test_runs_of_the_search_stand_beside_the_full_ones_where_it_was_a_quarter(monkeypatch):
    asked = set()

    class SizedRace(Scripted):
        def __init__(self, manifest, *_):
            super().__init__(lambda label: (2.0 if "ddp" in label else 2.1) + abs(rate_of(label) - 0.008))
            self.size = meta_layout(manifest).numel

        def run(self, labels, tokens):
            asked.add((self.size, tokens))
            return [replace(one, numel=self.size, tokens=tokens) for one in super().run(labels, tokens)]

        def note(self):
            return f"{self.size} parameters"

    monkeypatch.setattr(scaling, "Race", SizedRace)
    options = {"jobs": 1, "seed": 0, "device": "cpu", "resume": None, "recipe": "lagoon", "peers": 4, "tokens_each": 50}
    races = scaling.run_races(Namespace(sizes=["0.1M", "0.2M"], searched=["0.8M"], **options), print)
    assert asked == {
        (95_952, 2_688_800), (95_952, 4_797_600), (215_104, 2_688_800), (215_104, 10_755_200), (825_472, 10_318_400),
    }
    assert scaling.by_size(races.full) == pytest.approx({95_952: 5.0, 215_104: 5.0})
    assert scaling.by_size(races.early) == pytest.approx({215_104: 5.0, 825_472: 5.0})
    assert {one.label for one in races.full} - {one.label for one in races.early} == {
        f"ddp:average=0.99,inner.optimizer={name},inner.learning_rate=0.008" for name in ("adamw", "muon")
    }
    assert races.notes == ["95952 parameters", "215104 parameters", "825472 parameters"]
    assert [line[:2] for line in scaling.table(races.early)][::4] == [
        ("215,104", "2,688,800"), ("825,472", "10,318,400"),
    ]
    with pytest.raises(UserError, match="--searched 7M: no such size"):
        scaling.run_races(Namespace(sizes=[], searched=["7M"], **options), print)


def test_the_frontier_is_the_best_that_sends_as_little():
    losses = {30: 1.0, 100: 1.2, 300: 1.1, 1000: 1.3, 3000: 1.5, 10_000: 1.4}
    rows = [row(f"diloco:a={n}", loss, n * 1.01) for n, loss in losses.items()]
    best = frontier.frontier([*rows, row("diloco:a=diverged", None, 20_000.0)])
    assert frontier.frontier([row("diloco:a=diverged", None, 20_000.0)]) == {}
    assert {reduction: one.loss for reduction, one in best.items()} == {
        30: 1.0, 100: 1.1, 300: 1.1, 1000: 1.3, 3000: 1.4, 10_000: 1.4,
    }


def test_what_is_best_at_a_reduction_is_tuned():
    label = frontier.label_of("compressor=int8", 30, 33_696, 3072) + ",inner.optimizer=muon,inner.learning_rate=0.008"
    assert label.startswith("diloco:steps_per_round=8,compressor=int8,outer_learning_rate=0.9,")
    assert [one.rsplit("=", 1)[1] for one in frontier.other_rates(label)] == ["0.004", "0.016"]
    (last,) = frontier.other_averages(label)
    assert last == label.replace(",average=0.75", "") != label


def test_a_picture_has_the_gaps_of_each_codec(tmp_path):
    rows = [row(frontier.label_of(codec, 100, 33_696, 3072), loss, 101.0)
            for codec in frontier.CODECS[:2] for loss in (2.0, 1.9)]  # fmt: skip
    lines = frontier.by_codec(rows, row("ddp", 1.8))
    assert lines == {"int8": {101.0: pytest.approx(5.5556, abs=1e-4)}, "int4": {101.0: pytest.approx(5.5556, abs=1e-4)},
                     "int2": {}}  # fmt: skip
    for name, ticks in (("plain", {}), ("named", {100.0: "100x"})):
        draw_gaps(tmp_path / name, "title", "along", ticks, {**lines, "published": scaling.PUBLISHED})
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_rows_are_json(tmp_path):
    kept = ResumableRows(RaceRow, tmp_path / "rows")
    kept.keep(row("ddp", None))
    (line,) = (tmp_path / "rows").read_text().splitlines()
    assert json.loads(line)["row"]["loss"] is None
