"""`atoll compare`: every recipe with every seed on the same text and the same swarm, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from peer.errors import UserError
from peer.sim.campaign.label import Choice
from peer.sim.campaign.memory import check_swarm_memory
from peer.sim.campaign.plan import (
    MAX_SEED,
    Job,
    SwarmPlan,
    WindowPair,
    build_swarm,
    check_learns,
    common_settings,
    load_task,
    meta_layout,
    plan_jobs,
    task_summary,
    windows_for,
)
from peer.sim.campaign.pool import Pool
from peer.sim.campaign.report import CampaignReport, read_report
from peer.sim.cli.plots import draw
from peer.sim.cli.progress import CampaignWatch
from peer.sim.cli.tables import result_table, simulator_console
from peer.system.output_files import check_output_file, make_folder
from peer.system.resources import usable_cores
from peer.telemetry.figures import human_count
from peer.telemetry.write_guard import WriteGuard

INTERRUPTED = 130
MAX_JOBS = 256
MAX_SEEDS = 1000
MAX_STEPS_PER_ROUND = 100_000


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The flags of `atoll compare`.

    Raises:
        UserError: a number out of its range, or --resume without a report.
    """

    choices: list[Choice]
    baselines: tuple[str, ...]
    command: str
    peers: int
    tokens: str | None
    manifest: str | None
    network: str
    seeds: list[int]
    steps_per_round: int | None
    step_s: float
    jobs: int | None
    train_files: tuple[str, ...]
    report: Path | None
    resume: bool
    plot_tokens: Path | None
    plot_bytes: Path | None
    plots: Path | None
    evaluations: int
    device: str

    def __post_init__(self) -> None:
        if self.jobs is not None and not 1 <= self.jobs <= MAX_JOBS:
            raise UserError(f"--jobs={self.jobs}: must be from 1 to {MAX_JOBS}", "leave it out for one per core")
        if self.steps_per_round is not None and not 1 <= self.steps_per_round <= MAX_STEPS_PER_ROUND:
            raise UserError(f"--steps-per-round={self.steps_per_round}: must be from 1 to {MAX_STEPS_PER_ROUND}")
        if self.resume and self.report is None:
            raise UserError("--resume: needs --report FILE, the report to continue")


@dataclass(frozen=True, kw_only=True)
class _Campaign:
    """What is to be run, and the report that it goes to."""

    swarm: SwarmPlan
    windows: WindowPair
    jobs: list[Job]
    todo: list[Job]
    at_once: int
    report: CampaignReport


def run_compare(options: CompareOptions) -> int:
    """A comparison, from flags to table, report and pictures.

    Returns:
        0; 1 when a run died or hit a bug (not when it diverged, which is a result); 130 on Ctrl-C.

    Raises:
        UserError: a flag out of its range.
    """
    console = simulator_console()
    _check_outputs(options)
    campaign = _prepare(options, console)
    report, finished = campaign.report, len(campaign.jobs) - len(campaign.todo)
    guard = WriteGuard()
    if options.plots is not None:
        make_folder(options.plots)
    with (
        CampaignWatch(console, len(campaign.jobs), finished) as watch,
        Pool(campaign.at_once, campaign.windows, watch) as pool,
    ):
        try:
            for job, row in pool.run(campaign.todo):
                report.add(row)
                watch.finished(job, row)
                if options.report is not None:
                    _keep(report, options.report, guard)
        except KeyboardInterrupt:
            kept = len(report.rows()) if options.report is not None else 0
            where = f"{options.report} has {kept} finished runs; --resume continues it"
            watch.interrupted(where if kept else "nothing is kept")
            return INTERRUPTED
    return _conclude(console, options, campaign)


def _keep(report: CampaignReport, path: Path, guard: WriteGuard) -> None:
    """What has been computed, for --resume; a disk that is full now may have space when the comparison ends."""
    try:
        report.write(path)
    except UserError as error:
        guard.failed(str(path), error, error.what)
    else:
        guard.worked(str(path))


def _prepare(options: CompareOptions, console: Console) -> _Campaign:
    manifest = load_task(options.manifest)
    swarm = build_swarm(
        manifest, network=options.network, peers=options.peers, tokens=options.tokens, step_s=options.step_s,
        evaluations=options.evaluations, device=options.device,
    )
    limit, layout = options.steps_per_round or max(1, swarm.steps_per_peer // 10), meta_layout(manifest)
    jobs = plan_jobs(swarm, options.choices, options.seeds, limit, layout)
    at_once = min(options.jobs or usable_cores(), len(jobs))
    check_swarm_memory(layout.numel, jobs, at_once)
    check_learns(manifest)
    windows = windows_for(swarm, jobs, options.train_files)
    report = CampaignReport(
        command=options.command, task=task_summary(manifest, windows, layout.numel, options.train_files),
        settings=common_settings(swarm, windows), labels=[choice.label for choice in options.choices],
        seeds=options.seeds, baselines=options.baselines,
    )
    if options.resume and options.report is not None and options.report.exists():
        report.take_over(options.report)
    todo = [job for job in jobs if not report.has(job.label, job.seed, job.digest)]
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    say(f"{swarm.peers} peers ({swarm.scenario.name}), {human_count(layout.numel)} parameters, "
        f"{human_count(swarm.tokens)} tokens: {swarm.steps_per_peer} steps of each")
    done = f", {len(jobs) - len(todo)} of them already in the report" if len(todo) < len(jobs) else ""
    say(f"{len(options.choices)} recipes x {len(options.seeds)} seeds = {len(jobs)} runs{done}")
    for line in _adjustments(options.choices, jobs, limit):
        say(line)
    return _Campaign(swarm=swarm, windows=windows, jobs=jobs, todo=todo, at_once=at_once, report=report)


def _adjustments(choices: Sequence[Choice], jobs: Sequence[Job], limit: int) -> Iterator[str]:
    """Notes where a recipe differs from the published one, so that it is not mistaken for that."""
    pairs = [(choice.recipe(), job) for choice, job in zip(choices, jobs, strict=False)]
    if shorter := [
        f"{job.label} {before.steps_per_round}"
        for before, job in pairs
        if before.steps_per_round != job.recipe.steps_per_round
    ]:
        yield f"rounds of {limit} steps (--steps-per-round) in place of these recipes' own: {', '.join(shorter)}"
    for before, job in pairs:
        own, now = before.num_fragments, job.recipe.num_fragments
        if own != now:
            yield f"{now} fragments in place of {own} for this model: {job.label}"


def _conclude(console: Console, options: CompareOptions, campaign: _Campaign) -> int:
    swarm, document = campaign.swarm, campaign.report.document()
    title = f"{swarm.peers} peers, {human_count(swarm.tokens)} tokens, network {swarm.scenario.name}"
    console.print()
    if best := document["best_baseline"]:
        title += f"\ngaps are to {best}" + (f", the best of {len(options.baselines)}" * (len(options.baselines) > 1))
    console.print(result_table(document["summary"], title))
    if options.report is not None:
        campaign.report.write(options.report)
    if options.plot_tokens is not None:
        draw(options.plot_tokens, document, "tokens")
    if options.plot_bytes is not None:
        draw(options.plot_bytes, document, "bytes_sent_per_peer")
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if written := [str(path) for _, path in _outputs(options)]:
        say(f"\nwrote {', '.join(written)}")
    broken = [row for row in document["rows"] if row["status"] == "failed"]
    for row in broken:
        say(f"\n{row['label']}, seed {row['seed']}: {row['note']}\n{row.get('traceback', '')}", style="red")
    return 1 if broken else 0


def _outputs(options: CompareOptions) -> list[tuple[str, Path]]:
    named = (
        ("--report", options.report), ("--plot-tokens", options.plot_tokens), ("--plot-bytes", options.plot_bytes),
    )
    return [(flag, path) for flag, path in named if path is not None]


def _check_outputs(options: CompareOptions) -> None:
    for flag, path in _outputs(options):
        check_output_file(path, flag, options.plots)
    if options.report is not None and options.report.exists() and not options.resume:
        _check_replaceable(options.report)


def _check_replaceable(path: Path) -> None:
    """Hours of an interrupted campaign are not overwritten by a forgotten flag."""
    try:
        document = read_report(path)
    except UserError:
        return      # no report: the file was named on purpose
    if document.get("complete") is False:
        raise UserError(
            f"--report={path}: holds {len(document['rows'])} finished runs of an unfinished comparison",
            "add --resume to continue it, or delete the file",
        )


def parse_seeds(numbers: Iterable[int]) -> list[int]:
    """`--seeds 0 1 2` names them, `--seeds 3` counts them.

    Raises:
        UserError: out of range, or one twice.
    """
    given = list(numbers)
    if len(given) == 1:
        if not 1 <= given[0] <= MAX_SEEDS:
            raise UserError(f"--seeds={given[0]}: a number of seeds must be from 1 to {MAX_SEEDS}",
                            "or name at least two seeds: --seeds 0 1")
        return list(range(given[0]))
    for seed in given:
        if not 0 <= seed <= MAX_SEED:
            raise UserError(f"--seeds: {seed} must be from 0 to {MAX_SEED}")
        if given.count(seed) > 1:
            raise UserError(f"--seeds: {seed} is there twice")
    return given
