"""Equal shares of this machine's cores, for peers that have machines of their own in reality (Linux control groups)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.processes import session_pids

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000
KEPT = 0.2  # of the cores: what the kernel does for all, and so that shares fit beside one another


@contextlib.contextmanager
def equal_shares(leaders: Sequence[int], groups: Path = GROUPS) -> Iterator[bool]:
    """Inside, the processes of each session have an equal part of the cores at most, whether others want theirs or not.

    Together that is all but KEPT: of a machine that is busy to the last, none has its share at every moment.

    Args:
        leaders: of the sessions; what they start inside counts as theirs.
        groups: where the hierarchy is mounted, of version 1 or 2.

    Yields:
        False where the machine does not let this process make control groups: nothing is shared then.
    """
    own = groups / "cpu" if (groups / "cpu").is_dir() else groups
    quota_us = int(PERIOD_US * len(os.sched_getaffinity(0)) * (1.0 - KEPT) / len(leaders))
    made: list[Path] = []
    try:
        try:
            for leader in leaders:
                group = own / f"atoll-benchmark-{leader}"
                group.mkdir()
                made.append(group)
                _limit(group, quota_us)
                _move(session_pids(leader), group)
            shared = True
        except OSError:
            _remove(made)
            shared = False
        yield shared
    finally:
        _remove(made)


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _remove(made: list[Path]) -> None:
    """Their processes go back to where the groups were made."""
    while made:
        group = made.pop()
        with contextlib.suppress(OSError):
            _move([int(pid) for pid in (group / "cgroup.procs").read_text().split()], group.parent)
            group.rmdir()
