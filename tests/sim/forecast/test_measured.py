"""Predicted utilisation beside what `benchmarks.wan` measured of real peers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.wan import DELAY_MS, PEERS, STEP_S, manifest_of
from peer.outer.policy.schedules import Strided
from peer.outer.recipe.recipe import Recipe
from peer.outer.recipe.resolve import resolve
from peer.protocol.manifest import parse_manifest
from peer.sim.campaign.plan import meta_layout
from peer.sim.forecast.steady import steady
from peer.sim.world.scenario import BYTES_PER_MBIT, PeerProfile

ROWS = json.loads((Path(__file__).parents[3] / "docs/results/wan.json").read_text())["rows"]
ALIKE = [row for row in ROWS if not row["slow"]]  # simulated peers wait for a slow one; real ones take what it has


def as_on_a_swarm(recipe: Recipe, *, waits: bool) -> Recipe:
    """Trainers that never wait merge a result as late as the next round begins."""
    if waits:
        return recipe
    schedule = recipe.schedule
    late = schedule.period // schedule.num_fragments if isinstance(schedule, Strided) else schedule.steps
    return replace(recipe, schedule=replace(schedule, overlap_steps=late), merge=recipe.late_merge)


@pytest.mark.parametrize("row", ALIKE, ids=[f"{row['recipe']}-{row['waits']}-{row['mbit']:g}" for row in ALIKE])
def test_utilisation_is_within_15_percent_of_what_was_measured(row) -> None:
    manifest = parse_manifest(manifest_of(row["recipe"]).encode(), "benchmarks.wan")
    line = row["mbit"] * BYTES_PER_MBIT
    profile = PeerProfile(up_bytes_s=line, down_bytes_s=line, latency_s=DELAY_MS / 1000)
    recipe = as_on_a_swarm(resolve(manifest.recipe), waits=row["waits"])
    predicted = steady(recipe, meta_layout(manifest), [profile] * PEERS, STEP_S).utilisation
    measured = sorted(row["computing"])[len(row["computing"]) // 2] / 100
    assert predicted == pytest.approx(measured, rel=0.15)


def test_there_are_rows_of_peers_that_wait_and_of_peers_that_never_do() -> None:
    assert {row["waits"] for row in ALIKE} == {True, False}
