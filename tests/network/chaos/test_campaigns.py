"""More slices: the break point, an absent bootstrap, wrong clocks, crowds, a failing disk, a soak, secrets."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import break_point
from tests.network.chaos import absence, canaries, clocks, crowds, disk, rejoins, soak

pytestmark = pytest.mark.timeout(300)  # on busy cores each process takes its time to start
SEED = 17


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clocks.ClockSwarm]:
    """Three members that have made a round together."""
    swarm = clocks.ClockSwarm(tmp_path_factory.mktemp("campaigns"), steps=10, pace_s=0.1)
    try:
        swarm.open("a", "b", "c")
        swarm.run_until(lambda: swarm.settled() and all(seat.member.committed for seat in swarm.seats), 120.0)
        yield swarm
    finally:
        swarm.close()


@pytest.mark.long
@pytest.mark.long
def test_the_break_point_is_found_and_drawn(tmp_path: Path) -> None:
    report, plot = tmp_path / "break_point.json", tmp_path / "break_point.png"
    runs = break_point.Runs(counts=(2, 7), attacks=("sign-flip",), rounds=1, steps=1)
    rows = break_point.run(report, runs, plot=plot)
    assert [row.bad for row in rows] == [2, 7]
    assert all(row.clean_loss > 0 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = break_point.run(report, runs)
    assert again == rows  # not measured twice
    assert len(json.loads(report.read_text())["rows"]) == 2


def test_members_lose_no_round_while_the_bootstrap_is_away(swarm: clocks.ClockSwarm) -> None:
    trials = absence.Absences(swarm, random.Random(SEED))
    trials.one(3.0)
    counts = trials.counts()
    assert (counts["absences"], counts["rounds_lost"], counts["late_joins"]) == (1, 0, 0), counts
    assert counts["rounds_committed"] > 0


def test_a_clock_within_two_seconds_is_fine_and_one_beyond_is_told(swarm: clocks.ClockSwarm) -> None:
    trials = clocks.Clocks(swarm)
    trials.newcomer(2)
    trials.newcomer(-3600)
    counts = clocks.count(trials.rows)
    assert (counts["clocks"], counts["small_skews"], counts["large_starts"]) == (2, 1, 1)
    assert (counts["small_with_effect"], counts["not_refused_clearly"], counts["others_aborted"]) == (0, 0, 0), counts


def test_newcomers_find_the_members_in_a_crowd(tmp_path: Path) -> None:
    counts = crowds.run(SEED, tmp_path, ids=200, records=400, readers=2, members=2)
    assert (counts["forged_ids"], counts["records_offered"], counts["readers"] >= 2) == (200, 400, True)
    assert counts["forged_ids_held"] == 0, counts
    assert counts["members_shown"] == counts["members_looked_for"] >= 4, counts


def test_a_checkpoint_that_is_not_finished_costs_no_state_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    counts = disk.run(SEED, tmp_path, offsets=12, flips=50)
    assert counts["offsets"] == 12
    assert min(counts["how_writing_ended"]["killed"], counts["how_writing_ended"]["disk full"]) >= 2, counts
    assert counts["what_was_lost"] == []
    assert (counts["bits_flipped"], counts["what_was_not_found"]) == (50, [])


@pytest.mark.long
def test_peers_live_through_mixed_faults(tmp_path: Path) -> None:
    counts = soak.run(SEED, tmp_path, minutes=0.2, churned=2, steps=8, at_least=4)
    assert counts["faults"] >= 4, counts
    assert counts["rounds"] >= 1
    assert (counts["hangs"], counts["orphans"], counts["digest_mismatches"]) == (0, 0, 0), counts
    assert (counts["steady_deaths"], counts["steady_tracebacks"]) == (0, 0), counts


def test_kills_and_rejoins_are_counted_with_what_the_others_hold(tmp_path: Path) -> None:
    counts = rejoins.run(tmp_path, kills=4)
    assert (counts["rejoins"], counts["steady_deaths"], counts["steady_tracebacks"]) == (4, 0, 0), counts
    assert counts["rounds"] >= 4
    assert {len(samples) for samples in counts["samples"].values()} == {1}
    assert len(counts["watched"]) == 6


def test_secrets_stay_where_they_are_and_hostile_strings_are_text(tmp_path: Path) -> None:
    counts = canaries.run(tmp_path, peers=1, rounds=0)
    assert counts["strings_tried"] >= 80 * 20
    assert counts["what_got_through"] == []
    assert counts["places_searched"] > 5
    assert counts["what_was_found"] == []


def test_a_canary_in_a_file_is_found(tmp_path: Path) -> None:
    key = bytes(range(68))
    secrets = dict(canaries.forms(key))
    for number, form in enumerate(secrets.values()):
        (tmp_path / f"{number}.log").write_bytes(b"some words, then " + form + b" and others")
    files, found = canaries.search([tmp_path], secrets)
    assert files == len(secrets)
    assert {name for each in found for name in secrets if each.endswith(f": {name}")} == set(secrets)
