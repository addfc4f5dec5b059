"""`atoll simulate`: one run, watched, and its figures in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from peer.errors import UserError
from peer.sim.job import Progress, Row, one_thread, run_job, time_job
from peer.sim.label import Choice, parse_label, with_room
from peer.sim.memory import check_swarm_memory
from peer.sim.picture import draw
from peer.sim.plan import (
    MAX_SEED,
    Job,
    build_swarm,
    check_writable,
    common_settings,
    load_task,
    meta_layout,
    task_summary,
    windows_for,
)
from peer.sim.report import Report
from peer.sim.tables import human_duration, run_in_words, simulator_console

REFRESH_HZ = 4


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


def run_simulate(options: SimulateOptions) -> int:
    """One simulation, from flags to the summary.

    Returns:
        0; 1 when the run failed.

    Raises:
        UserError: a flag out of its range, or a swarm that could not go on.
    """
    _check_outputs(options)
    manifest = load_task(options.manifest)
    swarm = build_swarm(
        manifest, network=options.network, peers=options.peers, tokens=options.tokens, step_s=options.step_s,
        evaluations=options.evaluations,
    )
    own = Choice(label=manifest.recipe.name, spec=manifest.recipe, inner={})
    choice = own if options.recipe is None else parse_label(options.recipe)
    inner, layout = choice.apply_to(manifest.inner), meta_layout(manifest)
    recipe = with_room(choice, choice.recipe(), layout)
    seed = manifest.seed if options.seed is None else options.seed
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed={seed}: must be from 0 to {MAX_SEED}")
    job = Job(label=choice.label, recipe=recipe, inner=inner, seed=seed, swarm=swarm)
    one_thread()
    console = simulator_console()
    if options.timing_only:
        with _Watch(console) as watch:
            row, windows = time_job(job, layout, watch.tell), None
    else:
        check_swarm_memory(layout.numel, [job], 1)
        windows = windows_for(swarm, [job], options.train_files)
        with _Watch(console) as watch:
            row = run_job(job, windows, watch.tell)
    _raise_failure(row)
    report = Report(
        command=options.command, task=task_summary(manifest, windows, layout.numel),
        settings=common_settings(swarm, windows), labels=[job.label], seeds=[job.seed],
    )
    report.add(row)
    if options.report is not None:
        report.write(options.report)
    if options.plot is not None:
        draw(options.plot, report.document(), "tokens")
    words = run_in_words(row, layout.numel, swarm.step_s)
    console.print("\n" + words, markup=False, highlight=False, soft_wrap=True)
    return 0


def _check_outputs(options: SimulateOptions) -> None:
    for flag, path in (("--report", options.report), ("--plot", options.plot)):
        if path is not None:
            check_writable(path, flag)
    if options.timing_only and options.plot is not None:
        raise UserError("--plot: there is no loss to draw with --timing-only", "leave one of them out")
    if options.timing_only and options.train_files:
        raise UserError("--train-files: nothing is trained with --timing-only", "leave one of them out")


def _raise_failure(row: Row) -> None:
    if row["status"] == "stopped":
        raise UserError(row["note"], "try another --network or --recipe")
    if row["status"] == "failed":
        raise RuntimeError(f"{row['note']}\n{row.get('traceback', '')}")    # a bug: it keeps its traceback


class _Watch:
    """A progress bar with the last loss and the simulated time."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"), BarColumn(),
            TextColumn("{task.fields[state]}"), TimeRemainingColumn(), console=console, refresh_per_second=REFRESH_HZ,
        )
        self._bar = self._bars.add_task("", total=1, state="")

    def __enter__(self) -> _Watch:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @property
    def tell(self) -> Progress:
        """For the simulation; a step of a thousand peers costs microseconds, so this does hardly anything."""
        every, bars, bar = 1, self._bars, self._bar

        def tell(steps: int, goal: int, loss: float | None, virtual_s: float) -> None:
            nonlocal every
            if steps % every and steps != goal:
                return
            every = max(1, goal // 500)
            shown = "" if loss is None else f"loss {loss:.3f}, "
            bars.update(bar, total=goal, completed=steps, state=f"{shown}{human_duration(virtual_s)} simulated")

        return tell
