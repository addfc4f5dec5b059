from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.shares import PERIOD_US, equal_shares

CORES = len(os.sched_getaffinity(0))


@contextmanager
def sessions(count: int) -> Iterator[list[int]]:
    """Processes that do nothing, each leading a session; -> their ids."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    processes = [subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.communicate(timeout=30)


@pytest.mark.parametrize("version", [1, 2])
def test_each_session_gets_its_part_of_the_cores(tmp_path, monkeypatch, version) -> None:
    """What is written where; the kernel's own answer to it shows in the benchmark alone."""
    own = tmp_path / "cpu" if version == 1 else tmp_path
    own.mkdir(exist_ok=True)
    make = Path.mkdir

    def by_the_kernel(path: Path) -> None:
        make(path)
        for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",):
            (path / name).touch()

    monkeypatch.setattr(Path, "mkdir", by_the_kernel)
    quota = int(0.8 * PERIOD_US * CORES / 3)
    with sessions(3) as leaders, equal_shares(leaders, tmp_path) as shared:
        assert shared
        for leader in leaders:
            group = own / f"atoll-benchmark-{leader}"
            assert (group / "cgroup.procs").read_text() == str(leader)
            if version == 1:
                written = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
            else:
                written = (group / "cpu.max").read_text().split()
            assert written == [str(quota), str(PERIOD_US)]


def test_where_no_groups_may_be_made_nothing_is_shared(tmp_path) -> None:
    with sessions(2) as leaders, equal_shares(leaders, tmp_path / "missing") as shared:
        assert not shared
