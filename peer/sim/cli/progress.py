"""What a person sees while simulations run: bars on a terminal, and a line for each run that ended."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from peer.sim.campaign.job import OnProgress, Row
from peer.sim.campaign.plan import Job
from peer.sim.campaign.pool import JobProgress
from peer.telemetry.figures import human_bytes, human_duration

REFRESH_HZ = 4


class RunWatch:
    """A progress bar with the last loss and the simulated time."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"), BarColumn(),
            TextColumn("{task.fields[state]}"), TimeRemainingColumn(), console=console, refresh_per_second=REFRESH_HZ,
        )
        self._bar = self._bars.add_task("", total=1, state="")

    def __enter__(self) -> RunWatch:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @property
    def tell(self) -> OnProgress:
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


class CampaignWatch:
    """One bar per running job, one for all; a line for each that ended."""

    def __init__(self, console: Console, num_jobs: int, done: int) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn(),
            console=console, refresh_per_second=REFRESH_HZ,
        )
        self._all = self._bars.add_task("all runs", total=num_jobs, completed=done, state=f"{done} of {num_jobs}")
        self._num_jobs, self._done = num_jobs, done
        self._of_job: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> CampaignWatch:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._of_job.values():
            self._bars.remove_task(bar)
        self._bars.stop()

    def interrupted(self, what_is_kept: str) -> None:
        """Say so at once: the processes end behind it."""
        self._console.print(f"interrupted; {what_is_kept}", markup=False, highlight=False, soft_wrap=True)

    def started(self, job: Job) -> None:
        """A bar for it."""
        self._of_job[job.label, job.seed] = self._bars.add_task(_name(job), total=None, state="")

    def progress(self, progress: JobProgress) -> None:
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
