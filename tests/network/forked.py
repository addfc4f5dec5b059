"""Agents and bootstraps that start in a tenth of the time: forked from this process, which has imported everything.

What runs in the child is the production program from its first line on (`peer.swarm.agent.process.main`), as a child
of its trainer, in a session of its own and with nothing but its channel, its memory and its log; only the three
seconds of imports are saved, or the eight of a whole peer (`JoinedPeer`): minutes of the tests, and half an hour of the
campaigns. Tests of how a process starts and ends give it an environment: it is then started as a user starts it.

No test may use uvloop in its own process: libuv would take files that the child closes for its own, and abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

import peer.swarm.agent.session  # noqa: F401 - imported here, so that no child has to
from bootstrap.genesis import GenesisBuild
from peer import genesis
from peer.link import supervisor
from peer.link.supervisor import AgentProcess
from peer.swarm.agent import process as agent
from peer.system.death_signal import die_with_parent

Main = Callable[[], None]


class ForkedProcess:
    """A function that runs in a child process, as a program of its own. What its users need of a Popen.

    Args:
        main: the function; the child ends when it returns.
        arguments: its command line.
        log_path: its stderr is appended here, and its stdout unless there is another place for that.
        kept: file numbers that it keeps.
        stdout: file number of that other place.
    """

    def __init__(
        self, main: Main, arguments: Sequence[str], log_path: Path, kept: Sequence[int] = (), stdout: int | None = None
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(main, arguments, log_path, kept, stdout)
        os.close(writing)
        os.read(reading, 1)  # until it has a session of its own, to be killed with, and has closed all that is ours
        os.close(reading)

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
                raise subprocess.TimeoutExpired([f"process {self.pid}"], cast(float, timeout))
            signal.sigtimedwait([], 0.01)
        return code

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Any one, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedAgent(AgentProcess):
    """`AgentProcess` with another way to start.

    Args:
        log_path, clock: see `AgentProcess`.
        main: what runs in the child.
        arguments: its first ones.
    """

    def __init__(
        self, log_path: Path, clock: Callable[[], float] = time.monotonic, main: Main = agent.main,
        arguments: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(log_path, clock=clock)
        self._main, self._arguments = main, tuple(arguments)

    def start(self) -> None:
        """See `AgentProcess.start`."""
        assert not self.running
        self._discard()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            numbers = {"--channel": theirs.fileno(), "--memory": self.memory_descriptor, "--parent": os.getpid()}
            flags = [text for flag, number in numbers.items() for text in (flag, str(number))]
            kept = (theirs.fileno(), self.memory_descriptor)
            process = ForkedProcess(self._main, (*self._arguments, *flags), self.log_path, kept)
        self._process = cast("subprocess.Popen[bytes]", process)
        self._channel = ours
        self._started_at = self._clock()
        self.starts += 1


class ForkedBuild(GenesisBuild):
    """`GenesisBuild` whose child is forked: eight more seconds of imports are saved."""

    async def _start_child(self) -> asyncio.subprocess.Process:
        return cast("asyncio.subprocess.Process", _BuildingChild(self._arguments, self._state_path))


class _BuildingChild:
    """What `GenesisBuild` needs of a child."""

    def __init__(self, arguments: Sequence[str], state_path: Path) -> None:
        reading, writing = os.pipe()
        self._process = ForkedProcess(genesis.main, arguments, state_path.with_name("bootstrap.log"), stdout=writing)
        os.close(writing)
        self._output = os.fdopen(reading, "rb")
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def communicate(self) -> tuple[bytes, bytes]:
        with self._output:
            output = await asyncio.to_thread(self._output.read)
        await self.wait()
        return output, b""

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


def start_forked(main: Main, arguments: Sequence[str], log_path: Path, env: Mapping[str, str]) -> ForkedProcess:
    """Start a command in a process that has imported everything, and that dies with this one.

    Args:
        log_path: its stdout and stderr are appended here.
        env: all of its environment.
    """
    owner = os.getpid()

    def as_typed() -> None:
        die_with_parent(owner)
        os.environ.clear()
        os.environ.update(env)
        supervisor.AgentProcess = ForkedAgent  # type: ignore[misc, assignment]
        main()

    return ForkedProcess(as_typed, arguments, log_path)


def run_forked(
    main: Main, arguments: Sequence[str], log_path: Path, env: Mapping[str, str], timeout_s: float = 100.0
) -> tuple[int, str]:
    """Run a command to its end, see `start_forked`; -> (exit code, stdout and stderr together)."""
    process = start_forked(main, arguments, log_path, env)
    try:
        return process.wait(timeout_s), log_path.read_text()
    finally:
        process.kill()


def _become(
    main: Main, arguments: Sequence[str], log_path: Path, kept: Sequence[int], stdout: int | None
) -> NoReturn:
    code = 1
    try:
        asyncio._set_running_loop(None)
        gc.freeze()  # what earlier tests left, such as a task that failed, would be reported here when it is collected
        if os.getpgrp() != os.getpid():  # a bootstrap's children lead a group from their first moment
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        Path("/proc/self/comm").write_text(main.__module__[-15:])
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log if stdout is None else stdout, 1), (log, 2)):
            os.dup2(source, target)
        _close_all_but({0, 1, 2, *kept})
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        logging.root.handlers.clear()
        logging.disable(logging.NOTSET)
        for handler in filter(None, (reference() for reference in logging._handlerList)):  # type: ignore[attr-defined]
            if type(handler) is logging.StreamHandler:  # bound to a file that may be anything by now
                handler.stream = sys.stderr  # `setStream` would flush the other, which may be closed
        logging.addLevelName(logging.WARNING, "WARNING")  # hivemind, which no trainer imports, has renamed it
        sys.argv = [main.__module__, *arguments]
        main()
        code = 0
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
