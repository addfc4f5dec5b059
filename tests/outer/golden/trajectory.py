"""The reference run: 100 inner steps of DiLoCo, H 10, on four peers of unequal weight."""

from __future__ import annotations

from pathlib import Path

import torch

from peer.outer.recipes import resolve
from peer.protocol.manifest import RecipeSpec
from tests.outer.simulation import Swarm

GOLDEN_FILE = Path(__file__).with_name("diloco.json")


def anchors() -> list[list[float]]:
    """The anchor (16 values) after each of the 10 rounds."""
    recipe = resolve(RecipeSpec(name="diloco", steps_per_round=10))
    swarm = Swarm(
        recipe, lambda p: torch.optim.AdamW(p, lr=0.05), peers=4, numel=16, weights=[640.0, 320.0, 512.0, 640.0]
    )
    trajectory = []
    for _ in range(10):
        swarm.round()
        trajectory.append(swarm.anchor.tolist())
    return trajectory
