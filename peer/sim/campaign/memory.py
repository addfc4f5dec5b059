"""Whether a swarm of learning replicas fits this machine's memory."""

from __future__ import annotations

from collections.abc import Sequence

from peer.errors import UserError
from peer.outer.recipe.recipe import Recipe
from peer.sim.campaign.plan import Job
from peer.sim.learner.task import CPU
from peer.train.device import available_memory

BYTES = 4
WORKER_BYTES = 700 * 2**20      # torch, transformers and the text in one process
CONTEXT_BYTES = 700 * 2**20     # CUDA's own on the device, for one process
_GIB = 2.0**30


def bytes_per_peer(recipe: Recipe, parameters: int) -> int:
    """Roughly what one replica holds: parameters, moments, and what its recipe keeps beside them, fp32."""
    vectors = 3
    vectors += recipe.payload == "gradient"
    vectors += 0 if recipe.shared_anchor else 1 + len(recipe.outer.initial_values)
    vectors += recipe.feedback is not None
    vectors += 3 + len(recipe.outer.initial_values) if recipe.merge.eager else 0
    vectors += 4 if recipe.local.replays else 0
    return BYTES * parameters * (vectors + 1)       # a contribution under way


def check_swarm_memory(parameters: int, jobs: Sequence[Job], at_once: int) -> None:
    """Refuse what would be killed for memory after an hour.

    Raises:
        UserError: GiB needed and GiB free.
    """
    largest = max(jobs, key=lambda job: bytes_per_peer(job.recipe, parameters))
    peers = largest.swarm.peers
    held = peers * bytes_per_peer(largest.recipe, parameters)
    for device, overhead in ({largest.swarm.device: CONTEXT_BYTES} | {CPU: WORKER_BYTES}).items():
        needed, free = at_once * (overhead + held), available_memory(device)
        if needed <= free:
            continue
        fewer = "fewer --jobs, fewer --peers" if at_once > 1 else "fewer --peers"
        raise UserError(
            f"--peers={peers}: {at_once} runs at once like {largest.label}, each peer with {parameters / 1e6:.1f}M "
            f"parameters, need {needed / _GIB:.1f} GiB; {free / _GIB:.1f} GiB are free on {device}",
            f"{fewer}, a smaller model, or 'atoll simulate --timing-only', which holds no parameters",
        )
