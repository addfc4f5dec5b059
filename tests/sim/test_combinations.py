"""Parts that were not published together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sim.tiny import SGD, close, commits_of, scatter, simulate, spread
from tests.sim.tiny_task import StillTask


@pytest.mark.parametrize(("name", "overrides"), [
    ("streaming-diloco", {"compressor": "sparseloco", "outer": {"name": "fedadam", "lr": 0.02}, "steps_per_round": 6}),
    ("noloco", {"compressor": "int8", "steps_per_round": 5}),
    ("easgd", {"compressor": "int8", "steps_per_round": 4}),
    ("async-diloco", {"compressor": "sparseloco", "aggregator": "direction", "steps_per_round": 5}),
    ("demo", {"compressor": "top64/4096+sign"}),
    ("ddp", {"compressor": "int8", "straggler": "dropcompute"}),
    ("selsync", {"compressor": "dct8+top8/64+fp32", "exchange": "gather", "feedback": "sparseloco"}),
    ("fedglomo", {"compressor": "int8", "aggregator": "trimmed", "steps_per_round": 5}),
    ("paba", {"compressor": "muloco", "topology": "all", "local": "fedprox", "steps_per_round": 5}),
    ("diloco", {"topology": {"name": "groups", "size": 2}, "outer_momentum": 0.5, "steps_per_round": 5}),
    ("saps", {"schedule": {"name": "timer", "rate": 2.0}}),
    ("sparta", {"schedule": {"name": "every", "steps": 5, "overlap_steps": 3}}),
    ("lagoon", {"steps_per_round": 5, "outer_schedule": {"decay_from": 0.5, "final_lr": 0.3, "restart": 3},
                "interpolation": 0.5, "local": "palsgd", "aggregator": "penalised"}),
])
def test_combined_parts_run_and_learn(name: str, overrides: dict[str, Any]) -> None:
    assert simulate(name, steps=30, **overrides).loss < 2.6


def test_averages_of_parameters_by_fragments() -> None:
    """Gossip of one fragment leaves the others alone."""
    schedule = {"name": "strided", "period": 3, "num_fragments": 3}
    run, commits = commits_of(
        "fedavg", steps=3, schedule=schedule, payload="parameters", topology={"name": "groups", "size": 4},
        task=StillTask(), inner=SGD, prepare=scatter,
    )
    for commit, after in zip(commits, [*(c.locals for c in commits[1:]), run.locals], strict=True):
        ranges = run.simulation.fragments[commit.fragment]
        inside = torch.zeros(416, dtype=torch.bool)
        for start, stop in ranges:
            inside[start:stop] = True
        for before, now in zip(commit.locals, after, strict=True):
            assert torch.equal(before[~inside], now[~inside])
            close(now[inside], torch.stack(commit.locals).mean(0)[inside])
    assert spread(run.locals) < 1e-4
