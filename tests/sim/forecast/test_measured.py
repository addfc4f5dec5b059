"""Predicted utilisation beside what `benchmarks.wan` measured of real peers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.wan import DELAY_MS, PEERS, SLOWNESS, STEP_S, Case, manifest_of
from peer.outer.recipe.resolve import resolve
from peer.protocol.manifest import parse_manifest
from peer.sim.campaign.plan import meta_layout
from peer.sim.forecast.peers import PlannedPeers
from peer.sim.forecast.plan import Subject, forecast
from peer.sim.forecast.steady import steady
from peer.sim.world.scenario import BYTES_PER_MBIT, PeerProfile

ROWS = json.loads((Path(__file__).parents[3] / "docs/results/wan.json").read_text())["rows"]


def name(row) -> str:
    return f"{row['recipe']}-{row['mbit']:g}{'-waits' * row['waits']}{'-slow' * row['slow']}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_utilisation_is_within_15_percent_of_what_was_measured(row) -> None:
    manifest = parse_manifest(manifest_of(Case(recipe=row["recipe"], mbit=row["mbit"])).encode(), "benchmarks.wan")
    line = row["mbit"] * BYTES_PER_MBIT
    profile = PeerProfile(up_bytes_s=line, down_bytes_s=line, latency_s=DELAY_MS / 1000)
    last = replace(profile, speed=1 / SLOWNESS) if row["slow"] else profile
    peers = PlannedPeers(profiles=(*[profile] * (PEERS - 1), last), step_s=STEP_S, price=None)
    recipe, layout = resolve(manifest.recipe), meta_layout(manifest)
    if row["waits"]:  # as published, and as `atoll join` never does
        predicted = steady(recipe, layout, peers.profiles, STEP_S, layerwise=False).utilisation
    else:
        wait_s = manifest.rounds.straggler_wait_s
        subject = Subject(name="", layout=layout, tokens_per_step=1, peers=peers, wait_s=wait_s)
        predicted = forecast(row["recipe"], recipe, subject).utilisation
    measured = sorted(row["computing"])[len(row["computing"]) // 2] / 100
    assert predicted == pytest.approx(measured, rel=0.15)


def test_there_are_rows_of_peers_that_wait_and_of_peers_that_never_do() -> None:
    assert {row["waits"] for row in ROWS} == {True, False}
