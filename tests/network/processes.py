"""Whole peers and commands as child processes, and how to wait for what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peer.run.lifecycle  # noqa: F401 - so that no forked peer has to
from peer.cli import main
from peer.telemetry.metrics import read_metrics
from tests.network.forked import ForkedProcess, start_forked

PAUSE = threading.Event()
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
LAUNCH = [sys.executable, "-m", "peer.demo.launch", str(os.getpid())]  # dies with the test run, however that ends
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n"


def until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], object]) -> None:
    """Return as soon as the condition holds; fail with the explanation when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        PAUSE.wait(0.05)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without any setting, one thread for each process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(extra or {})}


def run(module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end; -> (exit code, stdout and stderr together)."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100
    )
    return done.returncode, done.stdout


def alive(pid: int) -> bool:
    """True unless the process is gone or a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descendants(pid: int) -> list[int]:
    """Every live process below `pid`, parents before their children."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return [child for child in found if alive(child)]


def _children(pid: int) -> list[int]:
    while True:
        try:
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            return [int(child) for task in tasks for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread has ended meanwhile: what it had started is another one's now


class JoinedPeer:
    """`atoll join` as a child in a process group of its own, on a few lines of text.

    Args:
        env: further variables of one that is started as a user starts it; else it is forked from this process.
    """

    def __init__(self, folder: Path, address: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        text = folder.parent / f"{folder.name}-text"
        text.mkdir(exist_ok=True)
        for name in ("a.txt", "b.txt"):
            (text / name).write_text(TEXT * 40)
        arguments = [
            "join", address, "--output-dir", str(folder), "--json", "--host-maddrs", LOOPBACK, "--train-files",
            str(text), "--nickname", folder.name, "--logging-steps", "1", "--eval-every-rounds", "0", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if env is None:
            self.process = start_forked(main, arguments, folder / "console.log", environment())
            return
        with (folder / "console.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*LAUNCH, sys.executable, "-m", "peer.cli", *arguments], env=environment(env), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )

    @property
    def identity(self) -> Path:
        return self.folder / "identity.key"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The metrics of one kind, oldest first."""
        return [event for event in read_metrics(self.folder / "metrics.jsonl") if event["event"] == kind]

    @property
    def step(self) -> int:
        steps = self.events("step")
        return int(steps[-1]["step"]) if steps else 0

    @property
    def committed(self) -> list[dict[str, Any]]:
        return [event for event in self.events("round") if event["status"] == "committed"]

    @property
    def round(self) -> int:
        return max((int(event["round"]) for event in self.events("round") if event["status"] != "aborted"), default=0)

    @property
    def agent(self) -> int | None:
        """The agent's process id, once it has one."""
        pids = descendants(self.process.pid)
        return next((pid for pid in pids if "agent.process" in _name(pid) + _command_line(pid)), None)

    @property
    def daemon(self) -> int | None:
        """The libp2p daemon's process id, once it runs."""
        return next((pid for pid in descendants(self.process.pid) if "p2pd" in _command_line(pid)), None)

    def said(self, level: str) -> list[str]:
        """What it has logged at this level, oldest first."""
        lines = (self.folder / "console.log").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [str(record["message"]) for record in records if record["level"] == level]

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group, as a terminal does with Ctrl-C."""
        os.killpg(self.process.pid, number)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
        """Until the condition holds; fails at once when this peer ends."""
        def holds() -> bool:
            assert self.process.poll() is None, self.log_text()
            return condition()

        until(holds, timeout_s, self.log_text)

    def log_text(self) -> str:
        """The end of what this peer and its agent said."""
        logs = [self.folder / "console.log", self.folder / "agent.log"]
        return "\n".join(log.read_text()[-3000:] for log in logs if log.exists())

    def close(self) -> None:
        """End it, if it has not ended, and wait for the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _name(pid: int) -> str:
    """Of a process that may be forked."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
