"""No refactoring changes the mathematics of a recipe unseen; `python -m tests.sim.golden` regenerates the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from peer.outer.policy.merge_rules import Mix
from peer.outer.recipe.published import RECIPES
from tests.sim.golden.trajectory import GOLDEN_FILE, trajectory
from tests.sim.tiny import recipe_of, simulate

GOLDEN: dict[str, dict[str, Any]] = json.loads(GOLDEN_FILE.read_text())
CHOOSING = {"fusionllm-adatopk": 1e-3}
"""Which values are the largest may hang on the last bit of a gradient, which differs between processors."""


def test_every_recipe_has_a_trajectory() -> None:
    assert set(GOLDEN) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_trajectory_is_what_it_was(name: str) -> None:
    now, before = trajectory(name), GOLDEN[name]
    for key in ("losses", "parameters", "norm"):
        assert now[key] == pytest.approx(before[key], rel=0.0, abs=CHOOSING.get(name, 1e-6)), key
    assert (now["bytes_sent_per_peer"], now["committed"]) == (before["bytes_sent_per_peer"], before["committed"])


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"eager-diloco"}))
def test_every_recipe_learns(name: str) -> None:
    losses = GOLDEN[name]["losses"]
    assert losses[-1] < 0.98 * losses[0], losses


def test_eager_updates_learn_with_less_momentum_and_better_than_naive_delay() -> None:
    """Ten rounds of which each solves much of the task: a whole round of delay under momentum .9 overshoots."""
    eager = recipe_of("eager-diloco", outer_momentum=0.3).with_steps_per_round(10)
    naive = replace(eager, merge=Mix(alpha=0.0))
    losses = [simulate(recipe, steps=100).loss for recipe in (eager, naive)]
    assert losses[0] < losses[1]
    assert losses[0] < 0.7 * GOLDEN["eager-diloco"]["losses"][0]
