"""One run of a campaign -> its row in the report."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import torch

from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout
from peer.sim.campaign.plan import Job, WindowPair
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.language_task import language_task

Row = dict[str, Any]
OnProgress = Callable[[int, int, float | None, float], None]


def run_job(job: Job, windows: WindowPair, progress: OnProgress | None = None) -> Row:
    """Simulate; failures are reported in the row, so that the other runs continue.

    Returns:
        `status`: `ok`, `diverged` (the loss is NaN), `stopped` (the swarm could not continue) or `failed` (a bug).
    """
    try:
        manifest = job.swarm.manifest.model_copy(update={"inner": job.inner})
        task = language_task(manifest, windows, job.seed, job.swarm.device)
        return row_of(job, Simulation(setup_of(job), task, progress=progress).run().row())
    except UserError as error:
        return failed_row(job, "stopped", error.what) | {"hint": error.hint}
    except Exception as error:      # the root of one run: the others must not be lost to a bug in one recipe
        return failed_row(job, "failed", f"{type(error).__name__}: {error}") | {"traceback": traceback.format_exc()}


def time_job(job: Job, layout: FlatLayout, progress: OnProgress | None = None) -> Row:
    """Simulate time and traffic alone.

    Raises:
        UserError: the swarm could not continue.
    """
    tokens_per_step = job.inner.batch_sequences * job.swarm.manifest.data.sequence_length
    return row_of(job, Simulation(setup_of(job), None, layout, tokens_per_step, progress).run().row())


def setup_of(job: Job) -> SimulationSetup:
    """What `Simulation` needs of a job."""
    swarm = job.swarm
    return SimulationSetup(
        recipe=job.recipe, inner=job.inner, profiles=swarm.scenario.draw(swarm.peers, job.seed), tokens=swarm.tokens,
        seed=job.seed, step_s=swarm.step_s, evaluations=swarm.evaluations, partitions=swarm.scenario.partitions,
    )


def row_of(job: Job, figures: Row) -> Row:
    """A simulation's figures as JSON; a loss that is no number becomes null, and one that did not fall gets a note."""
    row = _identity(job) | {key: value for key, value in figures.items() if key not in ("recipe", "seed")}
    loss, first = row["val_loss"], row["curve"][0]["val_loss"] if row["curve"] else math.inf
    diverged = loss is not None and not math.isfinite(loss)
    row |= {"status": "diverged" if diverged else "ok", "note": None}
    if diverged:
        row["note"] = f"diverged: the loss is {loss}"
    elif loss is not None and loss >= first:
        row["note"] = f"learned nothing: the loss was {first:.3f} before training"
    clean: Row = _without_nan(row)
    return clean


def failed_row(job: Job, status: str, note: str) -> Row:
    """The row of a run without figures."""
    empty = dict.fromkeys((
        "val_loss", "tokens", "bytes_sent_per_peer", "reduction_vs_ddp", "virtual_seconds", "utilization",
        "wall_seconds", "tally",
    ))
    return {**_identity(job), "peers": job.swarm.peers, **empty, "curve": [], "status": status, "note": note}


def one_thread() -> None:
    """Small models are fastest on one thread, and figures must not depend on how many runs share a machine."""
    torch.set_num_threads(1)


def _identity(job: Job) -> Row:
    return {
        "recipe": job.recipe.name, "label": job.label, "seed": job.seed, "settings": job.digest,
        "steps_per_round": job.recipe.steps_per_round,
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
