"""Peers that send what they have not learned, and what a swarm makes of it; the lies themselves: `test_attacks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.outer.aggregate.base import Aggregator
from peer.sim.world.scenario import PeerProfile
from tests.sim.tiny import PUBLISHED, SGD, commits_of, recipe_of, simulate
from tests.sim.tiny_task import TinyTask

IDEAL = PeerProfile()


def byzantine(attack: Any, count: int = 1, peers: int = 8) -> tuple[PeerProfile, ...]:
    return (replace(IDEAL, attack=attack),) * count + (IDEAL,) * (peers - count)


@pytest.mark.parametrize("name", ["ddp", "diloco", "sparseloco", "demo", "dybw", "streaming-diloco", "eager-diloco"])
def test_not_a_number_is_dropped_and_counted(name: str) -> None:
    steps = {"steps_per_round": 5} if name in ("diloco", "sparseloco", "streaming-diloco", "eager-diloco") else {}
    run = simulate(name, profiles=byzantine("nan", 2), steps=20, inner=PUBLISHED, **steps)
    assert set(run.result.tally.dropped) == {0, 1}
    if name not in ("dybw", "streaming-diloco"):
        assert run.result.tally.dropped[0] == run.result.tally.committed
    assert bool(run.consensus.isfinite().all())
    assert run.loss < 2.8


@pytest.mark.parametrize("name", ["ddp", "fedavg", "dybw"])
@pytest.mark.parametrize("aggregator", ["centred-clipping", "gated", "median"])
def test_robust_aggregators_survive_what_ruins_the_mean(name: str, aggregator: str) -> None:
    steps = {"steps_per_round": 5} if name == "fedavg" else {}
    profiles = byzantine("scale", 2)
    profiles = (*(replace(p, attack_scale=-1000.0) for p in profiles[:2]), *profiles[2:])
    robust = simulate(name, profiles=profiles, steps=25, aggregator=aggregator, straggler="wait", **steps)
    assert robust.loss < 2.2
    ruined = simulate(name, profiles=profiles, steps=10, straggler="wait", **steps)
    assert not ruined.loss < 2.8


class TrustsNobody(Aggregator):
    """An aggregator that drops everybody."""

    separable = True

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        raise ValueError(f"{len(contributions)} contributions of weight {sum(weights)} were dropped")


def test_a_round_in_which_nobody_is_trusted_changes_nothing() -> None:
    recipe = replace(recipe_of("fedavg", steps_per_round=10), aggregator=TrustsNobody())
    run, commits = commits_of(recipe, steps=20, inner=SGD)
    assert [commit.dropped for commit in commits] == [[0, 1, 2, 3]] * 2
    assert torch.equal(run.consensus, TinyTask().initial())


def test_where_no_gate_can_tell_nobody_is_dropped() -> None:
    gates = {"name": "gated", "min_cosine": 0.99, "max_duplicate_cosine": 1.0}
    run, commits = commits_of("fedavg", steps=20, steps_per_round=10, aggregator=gates, inner=SGD)
    assert [commit.dropped for commit in commits] == [[], []]
    assert not torch.equal(run.consensus, TinyTask().initial())
