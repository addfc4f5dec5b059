"""Memory and processor time of an agent together with the processes that it started (Linux)."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_SESSION_FIELD = 3  # of /proc/PID/stat, counted from the field behind the command's name
_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED; the clock's number is that of Linux's clock_getcpuclockid(3)


def session_pids(leader: int) -> list[int]:
    """Processes of the session that `leader` leads: an agent and its libp2p daemon."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int(_stat_fields(int(entry.name))[_SESSION_FIELD]) == leader:
                    found.append(int(entry.name))
    return sorted(found)


def pss_bytes(leader: int) -> int:
    """Proportional set size of a session in bytes: a page that n processes map counts 1/n in each."""
    return sum(_pss_of(pid) for pid in session_pids(leader))


def cpu_seconds(leader: int, command: str | None = None) -> float:
    """Processor time that the living processes of a session have used, user and system; those of one `command` only,
    if it is given.
    """
    return sum(
        own_cpu_seconds(pid) for pid in session_pids(leader) if command is None or _command(pid) == command
    )


def own_cpu_seconds(pid: int) -> float:
    """Processor time of all threads of one process, to the nanosecond; /proc counts in hundredths of a second.

    Raises:
        OSError: it has ended.
    """
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)


def parse_pss(rollup: str) -> int:
    """The `Pss:` line of a smaps_rollup, in bytes."""
    match = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


def available_bytes() -> int:
    """Memory that new processes can have without swapping, as the kernel estimates it."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


def highest_resident_bytes() -> int:
    """The most that was ever resident of this process."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


@contextlib.contextmanager
def sampled(read: Callable[[], float], period_s: float) -> Iterator[list[float]]:
    """Values of `read`, taken by a thread of its own every `period_s` while the context lasts."""
    values: list[float] = []
    over = threading.Event()

    def take() -> None:
        while not over.is_set():
            values.append(read())
            over.wait(period_s)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        over.set()
        thread.join()


def read_for(read: Callable[[], float], period_s: float, seconds: float) -> list[float]:
    """Values of `read` over some seconds in which this process does nothing else."""
    with sampled(read, period_s) as values:
        time.sleep(seconds)
    return values


def _pss_of(pid: int) -> int:
    try:
        return parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
