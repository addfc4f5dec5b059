"""Runs on several cores: a few processes that take one job after the other and tell how far they are."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from peer.data.packing import PackedTokens
from peer.errors import UserError
from peer.sim.campaign.job import Row, failed_row, one_thread, run_job
from peer.sim.campaign.plan import Job, WindowPair
from peer.system.death_signal import die_with_parent

REPORT_EVERY_S = 0.2
GRACE_S = 2.0
_FILES = ("train.tokens", "validation.tokens")  # raw int32


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """How far a job is: steps of all peers together; `loss` of the anchor when it was last measured."""

    job: Job
    steps: int
    goal_steps: int
    loss: float | None
    virtual_s: float


class Watch(Protocol):
    """Receives the progress of jobs; `CampaignWatch` implements it."""

    def started(self, job: Job) -> None:
        """A process has taken it."""

    def progress(self, progress: JobProgress) -> None:
        """Called a few times a second for each job."""


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None


class Pool:
    """Processes that end with the context, within a moment and whatever they are doing.

    Args:
        num_workers: at most that many at once.
        windows: written to a file that all workers map: one copy in memory, and nothing large goes through a pipe.
        watch: receives the progress of each job.
    """

    def __init__(self, num_workers: int, windows: WindowPair, watch: Watch) -> None:
        self._num_workers, self._windows, self._watch = num_workers, windows, watch
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="atoll-")
            for name, part in zip(_FILES, self._windows, strict=True):
                part.tokens.astype(np.int32, copy=False).tofile(Path(self._folder.name) / name)
        except OSError as error:
            raise UserError(f"the text cannot be written to {tempfile.gettempdir()}: {error.strerror}",
                            "free some space there, or set TMPDIR") from None
        return self

    def __exit__(self, *_: object) -> None:
        with self._folder:
            self._end()

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()   # nothing of theirs needs saving
        for worker in self._workers:
            worker.process.join(GRACE_S)
            worker.pipe.close()
        self._workers.clear()

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Row]]:
        """Every job with its row, in the order in which they end; a worker that dies costs its own job alone."""
        waiting = list(reversed(jobs))
        while len(self._workers) < min(self._num_workers, len(waiting)):
            self._workers.append(self._start_worker())
        for worker in self._workers:
            self._hand_out(worker, waiting)
        while busy := [worker for worker in self._workers if worker.job is not None]:
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                finished = self._listen(worker)
                if finished is not None:
                    self._hand_out(worker, waiting)
                    yield finished

    def _hand_out(self, worker: _Worker, waiting: list[Job]) -> None:
        worker.job = waiting.pop() if waiting else None
        if worker.job is None:
            return
        if not worker.process.is_alive():
            worker.pipe.close()
            fresh = self._start_worker()
            worker.process, worker.pipe = fresh.process, fresh.pipe
        self._watch.started(worker.job)
        with contextlib.suppress(OSError):      # it died: `_listen` notices
            worker.pipe.send(worker.job)

    def _listen(self, worker: _Worker) -> tuple[Job, Row] | None:
        """The next message of a worker; its job and row if that was the end of a job."""
        job = worker.job
        assert job is not None
        try:
            message: Any = worker.pipe.recv()
        except (EOFError, OSError):
            return job, failed_row(job, "failed", f"its process died ({_cause(worker.process)})")
        if isinstance(message, dict):
            return job, message
        steps, goal, loss, virtual_s = message
        self._watch.progress(JobProgress(job=job, steps=steps, goal_steps=goal, loss=loss, virtual_s=virtual_s))
        return None

    def _start_worker(self) -> _Worker:
        """A child that Ctrl-C does not reach: its parent ends it."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, Path(self._folder.name), self._windows[0].sequence_length, os.getpid())
        process = context.Process(target=_work, args=arguments, daemon=True)
        resource_tracker.ensure_running()  # its start, which the first child's would include, unblocks SIGINT
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        return _Worker(process, ours)


def _work(pipe: Connection, folder: Path, sequence_length: int, parent: int) -> None:
    """The main of a worker: jobs in, progress and rows out, until the parent goes."""
    die_with_parent(parent)
    one_thread()
    train, validation = (PackedTokens(np.memmap(folder / name, np.int32, "r"), sequence_length) for name in _FILES)
    said = 0.0

    def tell(steps: int, goal: int, loss: float | None, virtual_s: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= REPORT_EVERY_S:
            said = now
            pipe.send((steps, goal, loss, virtual_s))

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(run_job(job, (train, validation), tell))
        gc.collect()  # a simulation is full of cycles, and holds gigabytes in few objects


def _cause(process: SpawnProcess) -> str:
    process.join(GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        hint = ", probably out of memory" if code == -signal.SIGKILL else ""
        return f"signal {-code}{hint}"
    return f"exit code {code}"
