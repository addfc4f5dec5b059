"""The report: sums over seeds, going on, and what other commands have counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.table import page
from peer.errors import UserError
from tests.network.chaos.gated import PHASES
from tests.network.chaos.kills import Killer
from tests.network.chaos.report import ChaosReport, added

ONE = {"kills_per_phase": {"train": 40, "match": 41}, "hangs": 0, "orphans": 1, "longest_without_a_record_s": 7.5,
       "what_hung": ["a"]}  # fmt: skip
TWO = {"kills_per_phase": {"train": 2, "install": 50}, "hangs": 2, "longest_without_a_record_s": 3.0, "what_hung": []}


def test_counts_of_seeds_add_up() -> None:
    assert added([ONE, TWO]) == {
        "kills_per_phase": {"train": 42, "match": 41, "install": 50}, "hangs": 2, "orphans": 1,
        "longest_without_a_record_s": 7.5, "what_hung": ["a"],
    }  # fmt: skip
    assert ONE["kills_per_phase"] == {"train": 40, "match": 41}


def test_the_smallest_of_what_is_called_so_and_ratios_of_sums_are_reported(tmp_path: Path) -> None:
    report = ChaosReport(tmp_path / "chaos.json")
    for seed, borne, shown in ((17, 5, 80), (18, 4, 79)):
        report.put("G2", seed, {"break_point_runs": 9, "smallest_borne": borne})
        report.put("G10", seed, {"members_looked_for": 80, "members_shown": shown})
    values = {figure["name"]: figure["value"] for figure in report.to_dict()["figures"]}
    assert values["G2 runs with two to seven Byzantine peers of 16"] == 18
    assert values["G2 Byzantine peers up to which no run lost 2%"] == 4
    assert values["G10 share of the members that newcomers were shown meanwhile"] == 159 / 160


def test_a_report_goes_on_by_seed_or_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    report = ChaosReport(path, "first")
    report.put("G3", 17, ONE)
    again = ChaosReport(path, "second")
    assert again.done("G3")["orphans"] == 1
    assert again.free_seed("G3", 17) == 18
    assert again.free_seed("G4", 17) == 17
    again.put("G3", 18, TWO)
    document = json.loads(path.read_text())
    assert document["kills_per_phase"] == {"train": 42, "match": 41, "install": 50}
    assert (document["hangs"], document["orphans"], document["seeds"]) == (2, 1, [17, 18])
    assert document["commands"] == ["first", "second"]
    assert ChaosReport(path, "third", forget=["G3"]).done("G3") == {}


def test_what_is_forgotten_is_not_among_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    ChaosReport(path, "chaos --report x --campaign G3 --minutes 3").put("G3", 17, ONE)
    ChaosReport(path, "chaos --campaign G4").put("G4", 17, {"stops": 3})
    again = ChaosReport(path, "chaos --campaign G4 --minutes 9", forget=["G4"])
    assert again.to_dict()["commands"] == [
        "chaos --report x --campaign G3 --minutes 3", "chaos --campaign G4 --minutes 9",
    ]  # fmt: skip


def test_partitions_and_bad_links_have_their_targets(tmp_path: Path) -> None:
    report, other = ChaosReport(tmp_path / "chaos.json"), tmp_path / "g5.json"
    counts = {
        "trials": 50, "within": 49, "split": 50, "one_state": 50, "unexplained_tokens": 0, "longest_until_one_s": 15.5,
    }  # fmt: skip
    other.write_text(json.dumps({"seed": 0, "command": "partitions --report FILE", "counts": counts}))
    report.merge("G5", other)
    places, seats = {"loss 0": 40, "loss 5": 20}, {"loss 0": 40, "loss 5": 15}
    counts = {"conditions": 7, "committed": 200, "aborted": 9, "late": 0, "places": places, "seats": seats}
    other.write_text(json.dumps(counts))
    report.merge("G6", other)
    document = report.to_dict()
    met = {figure["name"]: figure["met"] for figure in document["figures"]}
    assert met["G5 partitions that healed"] is True
    assert met["G5 not on one lineage within 3 rounds"] is False
    assert met["G5 after which states differed"] is True
    assert met["G6 of them after their deadline"] is True
    values = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert values["G6 seats that members had, of all in those rounds, mean over losses"] == 87.5
    assert values["G6 the same with the loss that cost most"] == 75.0
    assert document["commands"] == ["partitions --report FILE"]
    report.put("G11", 17, {"parts_tampered": 200, "parts_caught": 199, "trials": 9})  # trials of another kind
    assert report.to_dict()["figures"][-1]["value"] == 0.995


def test_two_commands_may_keep_one_report(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    one, other = ChaosReport(path, "one"), ChaosReport(path, "other")
    one.put("G3", 17, ONE)
    other.put("G9", 17, {"inputs_fuzzed": 5})
    one.put("G3", 17, TWO)
    document = json.loads(path.read_text())
    assert (document["inputs_fuzzed"], document["hangs"]) == (5, 2)
    assert sorted(document["commands"]) == ["one", "other"]


def test_what_another_command_has_counted_is_taken_in_and_shown(tmp_path: Path) -> None:
    other = tmp_path / "attacks.json"
    other.write_text(json.dumps({"seed": 3, "counts": {"honest_wrongly_dropped": 0, "digests_compared": 7}}))
    report = ChaosReport(tmp_path / "chaos.json")
    report.put("G3", 17, {**ONE, "rounds": 300, "digests_compared": 5, "digest_mismatches": 0})
    report.merge("G1", other)
    document = report.to_dict()
    assert document["digests_compared"] == 12
    assert document["campaigns"]["G1"] == {"3": {"honest_wrongly_dropped": 0, "digests_compared": 7}}
    shown = page({"chaos": document})
    assert "| G3 kills | 81 | >= 500 | **no** |" in shown
    assert "| G3 processes left after 5 s | 1 | <= 0 | **no** |" in shown
    assert "| G3 states that differed | 0 | <= 0 | yes |" in shown
    other.write_text("[]")
    with pytest.raises(UserError, match="holds no JSON object"):
        report.merge("G1", other)


def test_kills_go_on_until_every_phase_has_had_its_share_in_all_parts_of_a_campaign() -> None:
    before = dict.fromkeys(PHASES, 12)
    assert Killer(None, random.Random(0), 1, 1, {**before, "commit": 9}).lacks(60)
    assert Killer(None, random.Random(0), 1, 1, {**before, "commit": 0}).lacks(60)
    enough = Killer(None, random.Random(0), 1, 1, {**before, "commit": 9})
    enough.kills["commit"] = 1
    assert not enough.lacks(60)
    assert enough.lacks(72)
