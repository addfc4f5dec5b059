"""What the simulator's benchmark computes from its samples, and how it counts tensors."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import simulator
from benchmarks.processes import highest_resident_bytes
from benchmarks.simulator import Findings, Memory, Overhead


def found() -> Findings:
    few = Memory(parameters=1000, tensors=9000, in_round=9000, resident=10**6)
    return Findings(
        replicas=2, swarm_peers=64, timed_peers=1000,
        overheads={"0.1M": Overhead(simulation_s=[1.0, 1.0, 3.0], bare_s=[1.0, 1.0, 2.0])},
        memories={
            ("diloco", 2): few,
            ("diloco", 4): Memory(parameters=1000, tensors=33_000, in_round=41_000, resident=10**6 + 26_000),
            ("sparseloco", 2): few,
            ("sparseloco", 4): Memory(parameters=1000, tensors=43_000, in_round=43_000, resident=10**6),
        },
        swarm=Memory(parameters=1000, tensors=0, in_round=0, resident=5 * 10**9),
        timed_s={"ddp": 7.0, "diloco:a=1": 70.0},
    )


def test_figures_are_of_one_more_replica_and_of_all_blocks_together() -> None:
    figures = {figure.name: figure for figure in found().figures()}
    assert figures["0.1M: simulator / 2 bare loops"].value == pytest.approx(1.25)
    assert figures["0.1M: simulator / 2 bare loops"].met is False
    assert figures["diloco, one more replica: tensors"].value == 12.0
    assert figures["diloco, one more replica: tensors"].met is True
    assert figures["diloco, one more replica: tensors, in a round"].value == 16.0
    assert figures["diloco, one more replica: process, at its peak"].value == 13.0
    assert figures["sparseloco, one more replica: tensors"].value == 17.0
    assert figures["sparseloco, one more replica: tensors"].limit == 16.5
    assert figures["64 peers of 0.1M: peak of the process"].met is False
    assert figures["1000 peers, time alone: ddp"].met is True
    assert figures["1000 peers, time alone: diloco"].met is False


def test_samples_are_json() -> None:
    samples = json.loads(json.dumps(found().samples()))
    assert samples["memory"][1] == {
        "recipe": "diloco", "replicas": 4, "parameters": 1000, "tensors": 33_000, "in_round": 41_000,
        "resident": 1_026_000,
    }


def test_a_storage_counts_once_however_many_tensors_view_it() -> None:
    before = simulator.tensor_bytes()
    kept = torch.zeros(10_000)
    views = [kept[:5], kept.view(100, 100)]
    assert simulator.tensor_bytes() - before == 40_000
    del kept, views
    assert simulator.tensor_bytes() == before


def test_the_highest_resident_set_does_not_fall() -> None:
    before = highest_resident_bytes()
    torch.ones(20_000_000)
    after = highest_resident_bytes()
    assert 0 < before <= after


def test_a_few_peers_are_timed() -> None:
    assert 0.0 < simulator.timing_seconds("diloco:steps_per_round=2", 3, 4, 0) < 5.0
