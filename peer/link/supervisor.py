"""The trainer's end of its agent: start it, talk to it, see it die, start it again, end it in bounded time.

Imports nothing heavy: the agent is started before anything else is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from peer.errors import UserError
from peer.link.messages import MAX_LINE_BYTES, Fatal, Message, Notice, ToAgent, decode, encode
from peer.printable import printable
from peer.protocol.manifest import Spec
from peer.system.clock import Clock

log = logging.getLogger(__name__)
AGENT_COMMAND = (sys.executable, "-m", "peer.swarm.agent.process")
SEND_TIMEOUT_S = 5.0
QUIET_S = 10.0
AWAITED = {"Anchor": "the swarm's state", "Published": "the run", "TokenizerFetched": "the run's tokenizer"}
MAX_RESTART_DELAY_S = 30.0
MessageT = TypeVar("MessageT", bound=Spec)


def create_descriptor() -> int:
    """A memfd of size zero; `peer.link.memory.SharedState` gives it its size once the model is known."""
    return os.memfd_create("atoll-state", os.MFD_CLOEXEC)


class AgentGoneError(Exception):
    """The agent's process has ended (crashed or was killed)."""


class AgentProcess:
    """One agent at a time, with the shared memory that outlives it. Use it from the main thread only: the agent dies
    with the *thread* that started it (PR_SET_PDEATHSIG).

    Args:
        log_path: the agent's stdout and stderr are appended here.
        command: starts the agent; `--channel`, `--memory` and `--parent` with their numbers are appended.
        clock: monotonic seconds, for the back-off between starts.
    """

    def __init__(
        self, log_path: Path, command: Sequence[str] = AGENT_COMMAND, clock: Clock = time.monotonic
    ) -> None:
        self.log_path, self._command, self._clock = log_path, tuple(command), clock
        self.memory_descriptor = create_descriptor()
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._partial = bytearray()
        self._inbox: deque[Message] = deque()
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start a new agent process; the previous one, if any, must be gone.

        Raises:
            AgentGoneError: this machine starts no process now.
        """
        assert not self.running
        self._discard()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [*self._command, "--channel", str(theirs.fileno()), "--memory", str(self.memory_descriptor)]
        command += ["--parent", str(os.getpid())]
        self._started_at = self._clock()
        self.starts += 1
        with self._open_log() as log, theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(), self.memory_descriptor),
                )
            except OSError as error:
                ours.close()
                raise AgentGoneError(f"it cannot be started: {error.strerror}") from error
        self._channel = ours

    def _open_log(self) -> BinaryIO:
        """The agent's log, or the null device: an agent without a log is better than none."""
        try:
            return self.log_path.open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    @property
    def may_restart(self) -> bool:
        """True once the back-off since the last start is over: 1, 2, 4, ... 30 s."""
        delay = min(MAX_RESTART_DELAY_S, 2.0 ** (self.starts - 1))
        return self._clock() - self._started_at >= delay

    def send(self, message: ToAgent) -> None:
        """Send one message; raises AgentGoneError when the agent is dead or does not read for 5 s."""
        if self._channel is None:
            raise AgentGoneError("agent not started")
        data = memoryview(encode(message))
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while data:
            try:
                data = data[self._channel.send(data) :]
            except BlockingIOError:
                if not self._ready(selectors.EVENT_WRITE, deadline - time.monotonic()):
                    raise AgentGoneError("agent does not read its messages") from None
            except OSError as error:
                raise AgentGoneError(str(error)) from error

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        """Next message, or None when none comes within `timeout_s`; raises AgentGoneError after the last one."""
        deadline = time.monotonic() + timeout_s
        while not self._inbox:
            self._fill()
            if self._inbox:
                break
            if time.monotonic() >= deadline:
                return None
            self._ready(selectors.EVENT_READ, deadline - time.monotonic())
        return self._inbox.popleft()

    def expect(self, wanted: type[MessageT], timeout_s: float) -> MessageT:
        """Wait for one kind of message, dropping others.

        Raises:
            UserError: the agent reported a fatal condition, died, or said nothing in time.
        """
        began = time.monotonic()
        deadline, told_at = began + timeout_s, QUIET_S
        while (left := deadline - time.monotonic()) > 0:
            if wanted.__name__ in AWAITED and time.monotonic() - began >= told_at:
                log.warning("waiting for %s for %.0f s: %s", AWAITED[wanted.__name__], told_at, self._last_logged())
                told_at *= 2
            try:
                message = self.receive(min(left, 0.5))
            except AgentGoneError:
                raise UserError("the agent process ended unexpectedly", f"its log is {self.log_path}") from None
            if isinstance(message, Fatal):
                raise UserError(message.what, message.hint)
            if isinstance(message, Notice):
                log.info("%s", message.text)
            if isinstance(message, wanted):
                return message
        raise UserError(
            f"the agent sent no {wanted.__name__.lower()} within {timeout_s:g} s", f"its log is {self.log_path}"
        )

    def _last_logged(self) -> str:
        """What the agent is at, in its own words."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return printable(lines[-1])[:300] if lines else "its agent has said nothing yet"

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for the agent to leave by itself, then kill its process group."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._discard()

    def close(self) -> None:
        """End the agent at once and free the shared memory."""
        self.end(0.0)
        os.close(self.memory_descriptor)

    def _discard(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._partial.clear()
        self._inbox.clear()

    def _ready(self, event: int, timeout_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, event)  # type: ignore[arg-type]
            return bool(selector.select(max(0.0, timeout_s)))

    def _fill(self) -> None:
        while True:
            if self._channel is None:
                raise AgentGoneError("agent not started")
            try:
                data = self._channel.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:  # it left messages of ours unread; its own last ones are here
                if not self._inbox:
                    raise AgentGoneError(str(error)) from error
                break
            if not data:
                if not self._inbox:
                    raise AgentGoneError("agent closed its channel")
                break
            self._partial += data
            assert len(self._partial) <= MAX_LINE_BYTES
            *lines, rest = bytes(self._partial).split(b"\n")
            self._partial = bytearray(rest)
            self._inbox.extend(decode(line) for line in lines)
