"""Children end with their owner, however it ends. The processes are real; they wait, they do not sleep for a result."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from peer.demo.children import Child, Children

OBEDIENT = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
OWNER = """
import os, signal, sys
from pathlib import Path
from peer.demo.children import Children
children = Children(os.environ)
for name in ("a", "b"):
    child = children.start(name, [sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]) / name)
    while not child.log_path.read_text():
        pass
    print(child.process.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def children() -> Iterator[Children]:
    manager = Children(os.environ)
    yield manager
    manager.stop(0.0)


def start(children: Children, name: str, code: str, folder: Path) -> Child:
    child = children.start(name, [sys.executable, "-c", code], folder / f"{name}.log")
    wait_until(lambda: child.log_path.read_text() != "" or child.code is not None)
    return child


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        select.select([], [], [], 0.01)


def is_alive(pid: int) -> bool:
    """A zombie that waits for its reaper is not alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_stop_asks_first_and_is_obeyed(children: Children, tmp_path: Path) -> None:
    child = start(children, "a", OBEDIENT, tmp_path)
    assert children.stop() == []
    assert child.code == -signal.SIGTERM


def test_stop_kills_those_that_do_not_obey_within_the_grace(children: Children, tmp_path: Path) -> None:
    obedient, stubborn = (start(children, *what, tmp_path) for what in (("a", OBEDIENT), ("b", STUBBORN)))
    before = time.monotonic()
    assert children.stop(0.3) == ["b"]
    assert 0.3 <= time.monotonic() - before < 2.0
    assert (obedient.code, stubborn.code) == (-signal.SIGTERM, -signal.SIGKILL)


def test_kill_ends_this_one_alone(children: Children, tmp_path: Path) -> None:
    victim, other = (start(children, name, OBEDIENT, tmp_path) for name in ("a", "b"))
    children.kill("a")
    assert victim.code == -signal.SIGKILL
    assert other.code is None
    assert [child.name for child in children.ended()] == ["a"]


def test_a_child_that_dies_shows_its_code_and_last_words(children: Children, tmp_path: Path) -> None:
    child = start(children, "a", "print(*range(40), sep='\\n'); raise SystemExit(3)", tmp_path)
    wait_until(lambda: child.code is not None)
    assert child.code == 3
    assert child.log_tail().splitlines() == [str(number) for number in range(25, 40)]


def test_the_pid_is_that_of_the_command_in_a_session_of_its_own(children: Children, tmp_path: Path) -> None:
    child = start(children, "a", f"import os; print(os.getpid(), os.getsid(0)); {OBEDIENT}", tmp_path)
    pid = child.process.pid
    assert child.log_path.read_text().split()[:2] == [str(pid), str(pid)]


@pytest.mark.parametrize("code", [OBEDIENT, STUBBORN], ids=["obedient", "stubborn"])
def test_sigkill_of_the_owner_leaves_nobody(tmp_path: Path, code: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        pids = [int(owner.stdout.readline()) for _ in range(2)]
    assert all(map(is_alive, pids))
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=5.0)
