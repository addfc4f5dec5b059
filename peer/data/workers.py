"""The processes that make segments, as their trainer sees them."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from peer.data.problems import SourceBusy
from peer.data.segments import SegmentHeader
from peer.data.worker import Answer, Beginning, Order
from peer.errors import AtollError

log = logging.getLogger(__name__)
MAX_RESTARTS = 5  # without a segment between them
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "1000000"}


class WorkerFailed(AtollError):
    """A segment could not be made for a reason that is no file's."""


class Workers:
    """Gives orders to `count` processes, by lane, and restarts one that ended.

    Args:
        folder: for files that must be on the disk before they can be read.

    Raises:
        WorkerFailed: a process ends again and again.
    """

    def __init__(self, beginning: Beginning, count: int, folder: Path) -> None:
        self._workers = [_Reader(beginning, folder) for _ in range(count)]

    def order(self, order: Order) -> Future[SegmentHeader]:
        """The future raises SourceBusy, WorkerFailed."""
        return self._workers[order.lane % len(self._workers)].order(order)

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()


class _Reader:
    def __init__(self, beginning: Beginning, folder: Path) -> None:
        self._beginning, self._folder, self._lock = beginning, folder, threading.Lock()
        self._given: dict[int, tuple[Order, Future[SegmentHeader]]] = {}
        self._closing, self._restarts = threading.Event(), 0
        self._problem: WorkerFailed | None = None
        self.process = self._start()

    def order(self, order: Order) -> Future[SegmentHeader]:
        future: Future[SegmentHeader] = Future()
        with self._lock:
            if self._problem is not None:
                future.set_exception(self._problem)
                return future
            self._given[order.number] = (order, future)
            self._send(order)
        return future

    def close(self) -> None:
        with self._lock:
            self._closing.set()
        self.process.kill()
        self.process.wait()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "peer.data.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **_ENVIRONMENT, "TMPDIR": str(self._folder)},
            start_new_session=True,  # what ends a terminal's or a service's processes ends the trainer, and so this one
        )  # fmt: skip
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._beginning.model_dump_json() + "\n")
            process.stdin.flush()
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _send(self, order: Order) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `_listen` starts another one
            self.process.stdin.write(order.model_dump_json() + "\n")
            self.process.stdin.flush()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._take_answers(process.stdout)
        code = process.wait()
        self._restarts += 1
        if self._closing.is_set():
            return
        if self._restarts > MAX_RESTARTS:
            self._give_up(f"the process that reads text ended {self._restarts} times, last with {code}")
            return
        log.warning("the process that reads text ended (exit code %d); starting another one", code)
        if self._closing.wait(min(10.0, 0.1 * 2**self._restarts)):
            return
        with self._lock:
            if self._closing.is_set():
                return
            self.process = self._start()
            for order, _ in self._given.values():
                self._send(order)

    def _give_up(self, what: str) -> None:
        with self._lock:
            self._problem = WorkerFailed(what)
            for _, future in self._given.values():
                future.set_exception(self._problem)
            self._given.clear()

    def _take_answers(self, lines: IO[str]) -> None:
        for line in lines:
            answer = Answer.model_validate_json(line)
            with self._lock:
                _, future = self._given.pop(answer.number)
            if answer.header is not None:
                self._restarts = 0
                future.set_result(answer.header)
            elif answer.busy is not None:
                future.set_exception(SourceBusy(answer.busy))
            else:
                future.set_exception(WorkerFailed(answer.failed or "no reason"))
