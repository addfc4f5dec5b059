"""The trajectory of every recipe: 100 steps of four peers on the tiny task, as numbers to compare to 1e-6.

The task computes losses and gradients in float64, so that what a machine's matrix products round otherwise stays far
below the fp32 of the parameters; the choices of top-k codecs and of signs are then the same everywhere, unless two
values are equal to eight digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer.outer.policy.schedules import Every, Strided
from peer.outer.recipe.published import RECIPES
from tests.sim.tiny import recipe_of, simulate

GOLDEN_FILE = Path(__file__).with_name("trajectories.json")
STEPS, STEPS_PER_ROUND, PROBES = 100, 10, 8


def trajectory(name: str) -> dict[str, Any]:
    """What one recipe does: ten losses, some parameters at the end, and the traffic."""
    recipe = recipe_of(name)
    if isinstance(recipe.schedule, Every | Strided) and recipe.steps_per_round > STEPS_PER_ROUND:
        recipe = recipe.with_steps_per_round(STEPS_PER_ROUND)
    run = simulate(recipe, steps=STEPS, evaluations=10)
    end = run.consensus
    stride = end.numel() // PROBES
    return {
        "losses": [point.val_loss for point in run.result.curve],
        "parameters": [float(end[index * stride]) for index in range(PROBES)],
        "norm": float(end.double().norm()),
        "bytes_sent_per_peer": run.result.bytes_sent_per_peer,
        "committed": run.result.tally.committed,
    }


def trajectories() -> dict[str, dict[str, Any]]:
    """All recipes, by name."""
    return {name: trajectory(name) for name in RECIPES}
