"""Child processes that end with us: in order when asked, at once when we are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 3.5
KILL_WAIT_S = 1.0
TAIL_LINES = 15
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class Child:
    """A started process and the file that its output goes to."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def code(self) -> int | None:
        """Exit code; minus the signal's number if one ended it; None while it runs."""
        return self.process.poll()

    def log_tail(self) -> str:
        """The last lines of its output."""
        try:
            text = self.log_path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        except OSError as error:
            return f"({error})"
        return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


class Children:
    """Starts and ends processes by name. Each has a session of its own, so that a Ctrl-C on the terminal reaches only
    us; if we die without a chance to act, the kernel kills them. Use it from the main thread only: that death signal
    is tied to the *thread* that starts a process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._children: dict[str, Child] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def start(self, name: str, command: Sequence[str], log_path: Path) -> Child:
        """Start a command with its output appended to `log_path`. The child's pid is that of the command itself."""
        assert name not in self._children
        launcher = [sys.executable, "-m", "peer.demo.launch", str(os.getpid())]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [*launcher, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=self._environment,
            )
        self._children[name] = Child(name=name, process=process, log_path=log_path)
        return self._children[name]

    def ended(self) -> list[Child]:
        """Those that have ended, for whatever reason."""
        return [child for child in self._children.values() if child.code is not None]

    def kill(self, name: str) -> None:
        """SIGKILL this process alone, as a crash would, and wait until it is gone."""
        process = self._children[name].process
        process.kill()
        process.wait()

    def stop(self, grace_s: float = GRACE_S) -> list[str]:
        """SIGTERM to all, and after `grace_s` SIGKILL to the process groups of those that still run.

        Returns:
            the names of those that had to be killed.
        """
        running = [child for child in self._children.values() if child.code is None]
        for child in running:
            child.process.terminate()
        _wait_all(running, grace_s)
        stubborn = [child for child in running if child.code is None]
        for child in stubborn:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        _wait_all(stubborn, KILL_WAIT_S)
        return [child.name for child in stubborn]


def _wait_all(children: Sequence[Child], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
