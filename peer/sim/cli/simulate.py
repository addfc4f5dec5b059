"""`atoll simulate`: one run, watched, and its figures in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest
from peer.sim.campaign.job import Row, one_thread, run_job, time_job
from peer.sim.campaign.label import Choice, parse_label, with_room
from peer.sim.campaign.memory import check_swarm_memory
from peer.sim.campaign.plan import (
    MAX_SEED,
    Job,
    build_swarm,
    check_learns,
    common_settings,
    load_task,
    meta_layout,
    task_summary,
    windows_for,
)
from peer.sim.campaign.report import CampaignReport
from peer.sim.cli.plots import draw
from peer.sim.cli.progress import RunWatch
from peer.sim.cli.tables import run_in_words, simulator_console
from peer.system.output_files import check_output_file


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The flags of `atoll simulate`."""

    manifest: str | None
    command: str
    peers: int
    network: str
    recipe: str | None
    tokens: str | None
    seed: int | None
    step_s: float
    evaluations: int
    train_files: tuple[str, ...]
    timing_only: bool
    report: Path | None
    plot: Path | None
    device: str


def run_simulate(options: SimulateOptions) -> int:
    """One simulation, from flags to the summary.

    Returns:
        0.

    Raises:
        UserError: a flag out of its range, or a swarm that could not continue.
    """
    _check_outputs(options)
    one_thread()
    manifest = load_task(options.manifest)
    layout = meta_layout(manifest)
    job = _job(options, manifest, layout)
    console = simulator_console()
    windows = None
    if not options.timing_only:
        check_swarm_memory(layout.numel, [job], 1)
        check_learns(manifest)
        windows = windows_for(job.swarm, [job], options.train_files)
    with RunWatch(console) as watch:
        row = time_job(job, layout, watch.tell) if windows is None else run_job(job, windows, watch.tell)
    _raise_failure(row)
    report = CampaignReport(
        command=options.command, task=task_summary(manifest, windows, layout.numel, options.train_files),
        settings=common_settings(job.swarm, windows), labels=[job.label], seeds=[job.seed],
        baselines=(),
    )
    report.add(row)
    words = run_in_words(row, layout.numel, job.swarm.step_s)
    console.print("\n" + words, markup=False, highlight=False, soft_wrap=True)
    if options.report is not None:
        report.write(options.report)
    if options.plot is not None:
        draw(options.plot, report.document(), "tokens")
    return 0


def _job(options: SimulateOptions, manifest: RunManifest, layout: FlatLayout) -> Job:
    swarm = build_swarm(
        manifest, network=options.network, peers=options.peers, tokens=options.tokens, step_s=options.step_s,
        evaluations=options.evaluations, device=options.device,
    )
    own = Choice(label=manifest.recipe.name, spec=manifest.recipe, inner={})
    choice = own if options.recipe is None else parse_label(options.recipe)
    seed = manifest.seed if options.seed is None else options.seed
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed={seed}: must be from 0 to {MAX_SEED}")
    return Job(
        label=choice.label, recipe=with_room(choice, choice.recipe(), layout), inner=choice.apply_to(manifest.inner),
        seed=seed, swarm=swarm,
    )


def _check_outputs(options: SimulateOptions) -> None:
    for flag, path in (("--report", options.report), ("--plot", options.plot)):
        if path is not None:
            check_output_file(path, flag)
    if options.timing_only and options.plot is not None:
        raise UserError("--plot: there is no loss to draw with --timing-only", "leave one of them out")
    if options.timing_only and options.train_files:
        raise UserError("--train-files: nothing is trained with --timing-only", "leave one of them out")


def _raise_failure(row: Row) -> None:
    if row["status"] == "stopped":
        raise UserError(row["note"], row["hint"] or "try another --network or --recipe")
    if row["status"] == "failed":
        raise RuntimeError(f"{row['note']}\n{row.get('traceback', '')}")    # a bug: it keeps its traceback
