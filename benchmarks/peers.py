"""The parent's side of `benchmarks.member`: peers as processes of their own, each leading a session."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.member import DAEMON, MemberSetup, TimedAveraging
from benchmarks.processes import cpu_seconds, pss_bytes, sampled, session_pids
from peer.errors import AtollError

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120.0
ANSWER_S = 60.0
CLOSE_TIMEOUT_S = 10.0
LOG_CHARS = 2000
SAMPLE_PERIOD_S = 0.01
REST_S, SETTLE_S = 1.0, 15.0
RESTLESS_BYTES = 256 * 1024
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
Start = Callable[[int], AbstractContextManager[None]]


class PeerFailedError(AtollError):
    """A peer's process died, or did not answer in time. The first line says which; the end of its log follows."""


@dataclass(frozen=True, kw_only=True)
class AveragingOutcome:
    """One averaging of all peers.

    Attributes:
        timed: what each member saw.
        cpu_s: processor time of all sessions from each member's beginning to the last member's end.
        daemon_cpu_s: of this, the libp2p daemons'.
        error: the largest `relative_error`; NaN if there was one.
        peaks: the largest PSS of each peer while it averaged, in bytes; empty if not sampled.
    """

    timed: tuple[TimedAveraging, ...]
    cpu_s: float
    daemon_cpu_s: float
    error: float
    peaks: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first member that began to the last that ended."""
        return max(one.ended for one in self.timed) - min(one.began for one in self.timed)

    @property
    def seconds_from_last(self) -> float:
        """From the last member that began to the last that ended."""
        return max(one.ended for one in self.timed) - max(one.began for one in self.timed)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase of the member that took longest for it."""
        return {name: max(one.phases[name] for one in self.timed) for name in self.timed[0].phases}


@dataclass(frozen=True, kw_only=True)
class PeersSetup:
    """What all peers of a run have in common.

    Attributes:
        module: what a peer runs: its `Member`.
        codec, numel, peers, seed: see `MemberSetup`.
        timeout_s: for what a round waits for; an answer may take twice that, and ANSWER_S.
        host: what each listens on.
    """

    module: str
    codec: str
    numel: int
    peers: int
    seed: int
    timeout_s: float = TIMEOUT_S
    host: str = LOOPBACK

    def member(self, index: int, folder: str, first: str) -> MemberSetup:
        """What one of them is told at its start."""
        return MemberSetup(
            codec=self.codec, numel=self.numel, peers=self.peers, index=index, seed=self.seed, folder=folder,
            timeout_s=self.timeout_s, first=first, host=self.host,
        )


class Peers:
    """All peers of one system, codec and size; use it as a context.

    Args:
        setup: of the peers.
        python: interpreter of the peers; this one's by default.
        start: entered while the process of a peer, given by its number, is started: a network namespace, say.
    """

    def __init__(self, setup: PeersSetup, *, python: str | None = None, start: Start | None = None) -> None:
        self._start_in = start or (lambda _index: contextlib.nullcontext())
        self._setup, self._python, self._answer_s = setup, python or sys.executable, 2 * setup.timeout_s + ANSWER_S
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-benchmark-", ignore_cleanup_errors=True)
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str]] = []

    def __enter__(self) -> Peers:
        try:
            first = self._start("")
            while len(self._processes) < self._setup.peers:
                self._spawn(first)
            for index in range(1, self._setup.peers):
                self._hear(index)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def average(self) -> AveragingOutcome:
        """One averaging, from fresh contributions to the check of the result."""
        self.meet()
        return self.go()

    def meet(self) -> None:
        """All that comes before an averaging."""
        self.ask("meet", self.ask("prepare"))

    def go(self, watch: bool = False) -> AveragingOutcome:
        """Average and check. To watch the memory slows the averaging down; the check's own memory does not count."""
        asked, peaks = self._spent(), list[int]()
        with self._memory_sampled(peaks) if watch else contextlib.nullcontext():
            timed = tuple(TimedAveraging(**answer) for answer in self.ask("average"))
        spent = [
            [now - before for now, before in zip(after, one.cpu or first, strict=True)]
            for one, first, after in zip(timed, asked, self._spent(), strict=True)
        ]
        errors: list[float] = self.ask("check")
        return AveragingOutcome(
            timed=timed, cpu_s=sum(whole for whole, _ in spent), daemon_cpu_s=sum(daemon for _, daemon in spent),
            error=max(errors, key=lambda error: (error != error, error)), peaks=tuple(peaks),
        )

    def _spent(self) -> list[tuple[float, float]]:
        """Processor time of each peer's session so far, as `processor_seconds` gives it there."""
        return [(cpu_seconds(leader), cpu_seconds(leader, DAEMON)) for leader in self.leaders]

    def take_what_is_left(self, index: int) -> None:
        """From now on a peer's processes run where no other process wants to: as if they had a machine of their own,
        but a slower one.
        """
        for pid in session_pids(self._processes[index].pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # it has ended; a new one takes after who starts it
                    os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

    def memory(self) -> list[int]:
        """PSS of each peer in bytes."""
        return [pss_bytes(leader) for leader in self.leaders]

    def memory_at_rest(self) -> list[int]:
        """`memory`, once it stays: a libp2p daemon grows by 10 MB in its first seconds, whatever its peer does."""
        now, until = self.memory(), time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            before = now
            time.sleep(REST_S)
            now = self.memory()
            if max(map(abs, map(operator.sub, now, before))) < RESTLESS_BYTES:
                break
        return now

    @contextlib.contextmanager
    def _memory_sampled(self, peaks: list[int]) -> Iterator[None]:
        """`peaks` becomes the largest PSS of each peer while the context lasts."""
        peaks[:] = self.memory()

        def take() -> float:
            peaks[:] = map(max, peaks, self.memory())
            return float(max(peaks))

        with sampled(take, SAMPLE_PERIOD_S):
            yield

    @property
    def leaders(self) -> Iterator[int]:
        """Process ids of the peers."""
        return (process.pid for process in self._processes)

    def _start(self, first: str) -> str:
        self._spawn(first)
        address = self._hear(0)
        assert isinstance(address, str)
        return address

    def _spawn(self, first: str) -> None:
        index = len(self._processes)
        setup = self._setup.member(index, self._folder.name, first)
        with self._log(index).open("w") as log, self._start_in(index):
            process = subprocess.Popen(
                [self._python, "-m", self._setup.module, json.dumps(asdict(setup))], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1, start_new_session=True, cwd=ROOT,
            )
        self._processes.append(process)
        self._answers.append(queue.Queue())
        threading.Thread(target=_read, args=(process, self._answers[-1]), daemon=True).start()

    def ask(self, what: str, given: Any = None) -> list[Any]:
        """Let all peers do something at the same time; -> their answers."""
        for index, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"do": what, "given": given}) + "\n")
            except OSError:
                raise self._failure(index, "is gone") from None
        return [self._hear(index) for index in range(self._setup.peers)]

    def _hear(self, index: int) -> Any:
        try:
            line = self._answers[index].get(timeout=self._answer_s)
        except queue.Empty:
            raise self._failure(index, f"said nothing for {self._answer_s:g} s") from None
        if not line:
            raise self._failure(index, "died")
        return json.loads(line)

    def _failure(self, index: int, what: str) -> PeerFailedError:
        log = self._log(index).read_text(errors="replace")[-LOG_CHARS:].strip()
        return PeerFailedError(f"peer {index} of {self._setup.peers} ({self._setup.module}) {what}\n{log}")

    def _log(self, index: int) -> Path:
        return Path(self._folder.name) / f"{index}.log"

    def _close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _end_session(process)
        self._folder.cleanup()


def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put("")


def _end_session(process: subprocess.Popen[str]) -> None:
    for pid in session_pids(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
