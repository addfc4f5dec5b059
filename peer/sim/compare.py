"""`atoll compare`: every recipe with every seed on the same text and the same swarm, side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from peer.errors import UserError
from peer.sim.job import Row
from peer.sim.label import Choice, parse_labels
from peer.sim.memory import check_swarm_memory
from peer.sim.picture import draw
from peer.sim.plan import (
    MAX_SEED,
    Job,
    Swarm,
    build_swarm,
    check_writable,
    common_settings,
    load_task,
    meta_layout,
    plan_jobs,
    task_summary,
    windows_for,
)
from peer.sim.pool import Pool, Progress
from peer.sim.report import REFERENCE, Report, read_report
from peer.sim.tables import human_duration, result_table, simulator_console
from peer.telemetry.console import human_bytes, human_count

INTERRUPTED = 130
MAX_JOBS = 256
MAX_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The flags of `atoll compare`."""

    recipes: list[str]
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
    evaluations: int


def run_compare(options: CompareOptions) -> int:
    """A comparison, from flags to table, report and pictures.

    Returns:
        0; 1 when a run died or hit a bug (not when it diverged, which is a result); 130 on Ctrl-C.

    Raises:
        UserError: a flag out of its range.
    """
    console = simulator_console()
    choices = parse_labels(options.recipes, REFERENCE)
    _check_options(options)
    manifest = load_task(options.manifest)
    swarm = build_swarm(
        manifest, network=options.network, peers=options.peers, tokens=options.tokens, step_s=options.step_s,
        evaluations=options.evaluations,
    )
    limit = options.steps_per_round or max(1, swarm.steps_per_peer // 10)
    layout = meta_layout(manifest)
    jobs = plan_jobs(swarm, choices, options.seeds, limit, layout)
    at_once = min(options.jobs or len(os.sched_getaffinity(0)), len(jobs))
    windows = windows_for(swarm, jobs, options.train_files)
    check_swarm_memory(layout.numel, jobs, at_once)
    report = Report(
        command=options.command, task=task_summary(manifest, windows, layout.numel),
        settings=common_settings(swarm, windows),
        labels=[choice.label for choice in choices], seeds=options.seeds,
    )
    if options.resume and options.report is not None and options.report.exists():
        report.take_over(options.report)
    todo = [job for job in jobs if not report.has(job.label, job.seed, job.digest)]
    _say_plan(console, swarm, choices, jobs, todo, limit, layout.numel)
    interrupted = False
    with _Watch(console, len(jobs), len(jobs) - len(todo)) as watch, Pool(
        at_once, windows, watch.started, watch.progress
    ) as pool:
        try:
            for job, row in pool.run(todo):
                report.add(row)
                watch.finished(job, row)
                if options.report is not None:
                    report.write(options.report)
        except KeyboardInterrupt:
            interrupted = True
    return _conclude(console, options, report, swarm, interrupted)


def _conclude(console: Console, options: CompareOptions, report: Report, swarm: Swarm, interrupted: bool) -> int:
    document = report.document()
    rows = document["rows"]
    if interrupted:
        kept = f"{len(rows)} finished runs are in {options.report}; --resume goes on with it"
        console.print(f"interrupted; {kept if rows and options.report is not None else 'nothing is kept'}",
                      markup=False, highlight=False)
        return INTERRUPTED
    if options.report is not None:
        report.write(options.report)
    title = f"{swarm.peers} peers, {human_count(swarm.tokens)} tokens, network {swarm.scenario.name}"
    console.print()
    console.print(result_table(document["summary"], title))
    for path, axis in ((options.plot_tokens, "tokens"), (options.plot_bytes, "bytes_sent_per_peer")):
        if path is not None:
            draw(path, document, axis)      # type: ignore[arg-type]
    outputs = [path for path in (options.report, options.plot_tokens, options.plot_bytes) if path is not None]
    if outputs:
        console.print("\nwrote " + ", ".join(str(path) for path in outputs), markup=False, highlight=False)
    broken = [row for row in rows if row["status"] == "failed"]
    for row in broken:
        console.print(f"\n{row['label']}, seed {row['seed']}: {row['note']}\n{row.get('traceback', '')}", markup=False,
                      highlight=False, style="red")
    return 1 if broken else 0


def _check_options(options: CompareOptions) -> None:
    if options.jobs is not None and not 1 <= options.jobs <= MAX_JOBS:
        raise UserError(f"--jobs={options.jobs}: must be from 1 to {MAX_JOBS}", "leave it out for one per core")
    if options.steps_per_round is not None and not 1 <= options.steps_per_round <= 100_000:
        raise UserError(f"--steps-per-round={options.steps_per_round}: must be from 1 to 100000")
    for path, flag in (
        (options.report, "--report"), (options.plot_tokens, "--plot-tokens"), (options.plot_bytes, "--plot-bytes"),
    ):
        if path is not None:
            check_writable(path, flag)
    if options.resume and options.report is None:
        raise UserError("--resume: needs --report FILE, the report to go on with")
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
            "add --resume to go on with it, or delete the file",
        )


def _say_plan(
    console: Console, swarm: Swarm, choices: Sequence[Choice], jobs: Sequence[Job], todo: Sequence[Job], limit: int,
    parameters: int,
) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    each = f"{swarm.steps_per_peer} steps of each"
    say(f"{swarm.peers} peers ({swarm.scenario.name}), {human_count(parameters)} parameters, "
        f"{human_count(swarm.tokens)} tokens: {each}")
    done = f", {len(jobs) - len(todo)} of them already in the report" if len(todo) < len(jobs) else ""
    say(f"{len(choices)} recipes x {len(jobs) // len(choices)} seeds = {len(jobs)} runs{done}")
    published = {choice.label: choice.recipe().steps_per_round for choice in choices}
    shorter = [
        f"{job.label} {published[job.label]}"
        for job in jobs[: len(choices)]
        if job.recipe.steps_per_round != published[job.label]
    ]
    if shorter:
        say(f"rounds of {limit} steps (--steps-per-round) in place of the published lengths: {', '.join(shorter)}")


class _Watch:
    """One bar per running job, one for all; a line for each that ended."""

    def __init__(self, console: Console, num_jobs: int, done: int) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn(),
            console=console, refresh_per_second=4,
        )
        self._all = self._bars.add_task("all runs", total=num_jobs, completed=done, state=f"{done} of {num_jobs}")
        self._num_jobs, self._done = num_jobs, done
        self._of_job: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> _Watch:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._of_job.values():
            self._bars.remove_task(bar)
        self._bars.stop()

    def started(self, job: Job) -> None:
        """A bar for it."""
        self._of_job[job.label, job.seed] = self._bars.add_task(_name(job), total=None, state="")

    def progress(self, progress: Progress) -> None:
        """Move its bar."""
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}"
        bar = self._of_job[progress.job.label, progress.job.seed]
        self._bars.update(bar, total=progress.goal_steps, completed=progress.steps, state=loss)

    def finished(self, job: Job, row: Row) -> None:
        """Its bar goes, a line stays."""
        self._bars.remove_task(self._of_job.pop((job.label, job.seed)))
        self._done += 1
        self._bars.update(self._all, completed=self._done, state=f"{self._done} of {self._num_jobs}")
        text = row["note"] or (
            f"loss {row['val_loss']:.4f}, {human_bytes(row['bytes_sent_per_peer'])} per peer, "
            f"{human_duration(row['wall_seconds'])}"
        )
        self._console.print(f"{_name(job)}: {text}", markup=False, highlight=False, soft_wrap=True)


def _name(job: Job) -> str:
    return f"{job.label}, seed {job.seed}"


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
