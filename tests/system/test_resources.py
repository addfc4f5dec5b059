"""The limits of containers: as the kernel writes them, and those of a real control group of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peer.system import resources
from peer.system.resources import available_memory, usable_cores
from tests.network.bootstraps import DILOCO, MANIFEST

MIB = 1 << 20
NO_LIMIT = 9223372036854771712


class Machine:
    """A /proc and the control groups of one process, written as the kernel does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.groups = folder / "proc", folder / "sys" / "fs" / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 99 kB\nMemAvailable:   4194304 kB\n")  # 4096 MiB
        self.write(self.proc / "self" / "mountinfo", "22 28 0:20 / /proc rw - proc proc rw\n")
        monkeypatch.setattr(resources, "PROC", self.proc)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount(self, kind: str, root: str, folder: str, options: str, path: str) -> None:
        with (self.proc / "self" / "mountinfo").open("a") as file:
            file.write(f"31 22 0:26 {root} {self.groups / folder} rw,nosuid shared:9 - {kind} {kind} {options}\n")
        controllers = "" if kind == "cgroup2" else options.removeprefix("rw,")
        with (self.proc / "self" / "cgroup").open("a") as file:
            file.write(f"4:{controllers}:{path}\n")

    def group(self, folder: str, **files: str) -> None:
        for name, text in files.items():
            self.write(self.groups / folder / name.replace("__", "."), f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_control_groups_the_machine_is_the_limit(machine):
    assert available_memory() == 4096 * MIB
    assert usable_cores() == 8
    (machine.proc / "meminfo").unlink()
    assert available_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_tightest_limit_of_cgroup_v2_counts_at_every_height(machine):
    machine.mount("cgroup2", "/", "", "rw", "/pod/box")
    machine.group("pod/box", memory__max="max", memory__high="max", memory__current=f"{100 * MIB}",
                  cpu__max="max 100000")  # fmt: skip
    assert available_memory() == 4096 * MIB
    assert usable_cores() == 8
    machine.group("pod", memory__max=f"{800 * MIB}", memory__current=f"{300 * MIB}", cpu__max="250000 100000",
                  memory__stat=f"anon 5\ninactive_file {60 * MIB}\nactive_file {40 * MIB}")  # fmt: skip
    assert available_memory() == 600 * MIB
    assert usable_cores() == 2
    machine.group("pod/box", memory__high=f"{500 * MIB}", cpu__max="50000 100000")
    assert available_memory() == 400 * MIB
    assert usable_cores() == 1
    machine.group("pod/box", memory__high=f"{50 * MIB}")
    assert available_memory() == 0


@pytest.mark.parametrize(("root", "path", "folder"), [
    ("/", "/pod/box", "pod/box"),       # on the machine itself
    ("/pod/box", "/pod/box", "."),      # in a container that sees its own groups alone
    ("/", "/../../elsewhere", "."),     # in a namespace of groups
    ("/", "/gone", "."),
])  # fmt: skip
def test_limits_of_cgroup_v1_are_found_where_a_container_sees_them(machine, root, path, folder):
    machine.mount("cgroup", root, "memory", "rw,memory", path)
    machine.mount("cgroup", root, "cpu,cpuacct", "rw,cpu,cpuacct", path)
    machine.group(f"memory/{folder}", memory__limit_in_bytes=f"{NO_LIMIT}", memory__usage_in_bytes=f"{100 * MIB}")
    machine.group(f"cpu,cpuacct/{folder}", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert available_memory() == 4096 * MIB
    assert usable_cores() == 8
    machine.group(f"memory/{folder}", memory__limit_in_bytes=f"{800 * MIB}",
                  memory__stat=f"inactive_file 1\ntotal_inactive_file {30 * MIB}\ntotal_active_file {20 * MIB}")
    machine.group(f"cpu,cpuacct/{folder}", cpu__cfs_quota_us="300000")
    assert available_memory() == 750 * MIB
    assert usable_cores() == 3


@contextmanager
def real_group(controller: str, **files: int) -> Iterator[Path]:
    """A control group of this machine (cgroup v1, as root)."""
    folder = Path("/sys/fs/cgroup", controller, f"atoll-test-{os.getpid()}")
    folder.mkdir()
    try:
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(str(value))
        yield folder
    finally:
        folder.rmdir()


def ask(does: str, *groups: Path, code: int = 0) -> str:
    """What a new process in these groups prints before it exits with this code."""
    enter = "; ".join(f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))" for group in groups)
    done = subprocess.run(
        [sys.executable, "-c", f"import os; {enter}; {does}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stdout.strip()


def test_a_model_that_fits_the_machine_and_not_its_container_is_refused(tmp_path):
    manifest = tmp_path / "run.yaml"
    text = MANIFEST.format(hidden=4096, recipe=DILOCO, steps=5, wait=5.0, total="")
    manifest.write_text(text.replace("intermediate_size: 4096", "intermediate_size: 16384"))
    command = [sys.executable, "-m", "peer.genesis", str(manifest), "--out", str(tmp_path / "genesis.bin")]
    with real_group("memory", memory__limit_in_bytes=800 * MIB) as memory:
        refused = json.loads(ask(f"os.execv({command[0]!r}, {command!r})", memory, code=2))
    assert re.match(r"a model of 269\.5M parameters needs 3\.01 GiB; 0\.\d\d GiB free on cpu", refused["what"])
    assert "raise the limit of its container" in refused["hint"]


def test_a_real_limit_is_seen():
    with real_group("memory", memory__limit_in_bytes=800 * MIB) as memory, real_group(
        "cpu", cpu__cfs_period_us=100_000, cpu__cfs_quota_us=100_000
    ) as cpu:
        code = "from peer.system.resources import *; print(available_memory(), usable_cores())"
        free, cores = map(int, ask(code, memory, cpu).split())
        assert 600 * MIB < free < 800 * MIB
        assert cores == 1
