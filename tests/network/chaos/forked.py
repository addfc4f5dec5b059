"""Agents that start in a tenth of the time: forked from this process, which has imported everything already.

What runs in the child is the production agent from its first line on (`peer.swarm.agent.main`), as a child of its
trainer, in a session of its own and with nothing but its channel, its memory and its log; only the three seconds of
imports are saved, of which the campaigns would need half an hour.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

import peer.swarm.session  # noqa: F401 - imported here, so that no child has to
from peer.link.supervisor import AgentProcess
from tests.network.chaos import gated


class ForkedAgent(AgentProcess):
    """`AgentProcess` with another way to start.

    Args:
        folder: of the member; see `gated`.
        clock: see `AgentProcess`.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        super().__init__(folder / "agent.log", clock=clock)
        self._folder = folder

    def start(self) -> None:
        """See `AgentProcess.start`."""
        assert not self.running
        self._discard()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_agent(self._folder, self.log_path, theirs.fileno(), self.memory_descriptor, parent)
        theirs.close()
        self._process = cast("subprocess.Popen[bytes]", ForkedProcess(pid))
        self._channel = ours
        self._started_at = self._clock()
        self.starts += 1


class ForkedProcess:
    """What `AgentProcess` uses of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired, as Popen does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([f"agent {self.pid}"], cast(float, timeout))
            signal.sigtimedwait([], 0.01)
        return code


def _become_agent(folder: Path, log_path: Path, channel: int, memory: int, parent: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        _close_all_but({0, 1, 2, channel, memory})
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.root.handlers.clear()
        logging.disable(logging.NOTSET)
        flags = ("--channel", channel, "--memory", memory, "--parent", parent)
        sys.argv = ["agent", str(folder), *map(str, flags)]
        gated.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
