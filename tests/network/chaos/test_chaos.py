"""Slices of the campaigns: one swarm of four lives through kills, stops and attacks; then bytes and donors that lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.network.chaos import attacks, donors, fuzz, kills, stops
from tests.network.chaos.gated import PHASES
from tests.network.chaos.swarm import ChaosSwarm

SEED = 17
ATTACKS = (  # those that need a seat are apart: it is refused for a minute after a fresh identity has cost a round
    "member: a contribution of the wrong size", "history: chunks that are not there", "directory: heavier ghosts",
    "round: 2 GB announced", "member: an abort that blames an honest peer", "join: nested JSON",
    "directory: a heavier lineage with a hostile donor", "leader: two rosters for one round",
    "join: a replayed one of an honest peer",
)  # fmt: skip


@pytest.fixture  # one each: after the attacks, peers refuse each other for a while
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosSwarm]:
    """Four members that have made a round together."""
    swarm = ChaosSwarm(tmp_path_factory.mktemp("chaos"))
    try:
        swarm.open("a", "b", "c", "d")
        swarm.run_until(lambda: swarm.settled() and all(seat.member.committed for seat in swarm.seats), 120.0)
        yield swarm
    finally:
        swarm.close()


@pytest.mark.timeout(300)
def test_kills_in_every_phase_leave_no_hang_no_orphan_and_equal_states(swarm: ChaosSwarm) -> None:
    counts = kills.run(SEED, len(PHASES), swarm, at_once=2, untouched=2, minutes=3.0)
    assert min(counts["kills_per_phase"].values()) >= 1, counts
    assert (counts["hangs"], counts["orphans"], counts["digest_mismatches"]) == (0, 0, 0), counts
    assert counts["processes_checked"] >= 2 * len(PHASES)
    assert counts["digests_compared"] >= len(PHASES)


@pytest.mark.timeout(300)
def test_a_peer_that_stood_still_comes_back_and_nobody_waits_for_it(swarm: ChaosSwarm) -> None:
    counts = stops.run(SEED, 2, swarm, shortest_s=2.0, longest_s=4.0, slow_rounds=2, minutes=2.0)
    assert counts["stops"] == 2
    assert (counts["late_others"], counts["digest_mismatches"]) == (0, 0), counts
    assert sum(counts["rounds_until_back"].values()) == 2, counts
    assert counts["slow_peer_rounds"] >= 2


def test_a_refusal_lasts_as_long_as_the_last_line_about_that_peer_says() -> None:
    line = "2026-11-28 03:00:{} WARNING peer.swarm.trust.stalls: {} gets no seat from this peer for {} s"
    log = "\n".join([line.format("00,500", "a", 77), line.format("40,000", "a", 7), line.format("50,000", "b", 99)])
    assert stops.refused_until(log, "a") - stops.refused_until(log.replace(" 77 s", " 70 s"), "a") == 7.0
    assert stops.refused_until(log, "b") - stops.refused_until(log, "a") == 71.5
    assert stops.refused_until(f"{log} (3 more such warnings were left out)", "b") == stops.refused_until(log, "b")
    assert stops.refused_until(log, "c") == 0.0


@pytest.mark.timeout(600)
def test_honest_peers_go_on_under_attack(swarm: ChaosSwarm) -> None:
    counts = attacks.run(SEED, ATTACKS, swarm)
    assert len(counts["what_was_not_made"]) <= 1, counts
    assert counts["attacks"] == len(ATTACKS) - len(counts["what_was_not_made"]), counts
    assert (counts["attacks_lost"], counts["honest_wrongly_dropped"]) == (0, 0), counts
    assert counts["largest_memory_growth_mb"] < 200.0
    assert counts["digest_mismatches"] == 0


def test_no_input_crashes_a_parser_and_nothing_forged_is_believed() -> None:
    counts = fuzz.run(SEED, 8000)
    assert counts["inputs_fuzzed"] == 8000
    assert (counts["crashes"], counts["forgeries_accepted"]) == (0, 0), counts
    assert min(counts["inputs_per_parser"].values()) > 0
    assert counts["largest_fuzz_memory_growth_mb"] < 200.0


def test_a_lying_donor_poisons_nobody_and_is_the_only_one_accused() -> None:
    counts = donors.run(SEED, 40)
    assert counts["parts_tampered"] >= 40
    assert counts["parts_caught"] >= 0.99 * counts["parts_tampered"]
    assert (counts["poisoned_joins"], counts["joins_failed"], counts["false_accusations"]) == (0, 0, 0), counts
