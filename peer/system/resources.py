"""The memory and the cores that this process may use: those of the machine, within the limits of its container.

A container's limits are those of its control groups (cgroup v1 and v2); a limit of any group above counts as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
UNLIMITED = 1 << 60  # cgroup v1 names no limit by a number near the largest
V1_ROOT, V2_ROOT = "cgroup", "cgroup2"


def available_memory() -> int:
    """Bytes of memory that this process can still take without being killed for it."""
    return max(0, min([_available_ram(), *_rooms()]))


def usable_cores() -> int:
    """Cores that this process can keep busy: its affinity, and whole cores of its CPU quota, at least one."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def resident_memory() -> int:
    """Bytes of RAM that this process takes, of shared memory what it has touched."""
    return int(_text(PROC / "self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_ram() -> int:
    with contextlib.suppress(OSError):
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rooms() -> Iterator[int]:
    """Bytes left below each memory limit; what the kernel can drop of files is not counted as taken."""
    for group in _groups(V2_ROOT, "memory"):
        limit = min(_number(group / "memory.max"), _number(group / "memory.high"))
        if limit < UNLIMITED:
            stat = _figures(group / "memory.stat")
            dropped = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            yield limit - max(0, _number(group / "memory.current") - dropped)
    for group in _groups(V1_ROOT, "memory"):
        limit = _number(group / "memory.limit_in_bytes")
        if limit < UNLIMITED:
            stat = _figures(group / "memory.stat")
            dropped = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
            yield limit - max(0, _number(group / "memory.usage_in_bytes") - dropped)


def _quotas() -> Iterator[float]:
    for group in _groups(V2_ROOT, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    for group in _groups(V1_ROOT, "cpu"):
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # -1: none
            yield int(quota) / int(period)


def _groups(kind: str, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it, as far as this mount shows them."""
    for mount, root in _mounts(kind, controller):
        path = _path_of(kind, controller)
        if path is None:
            continue
        inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
        folder = mount / inside
        if ".." in inside.parts or not folder.is_dir():  # the group of another namespace
            folder = mount
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _mounts(kind: str, controller: str) -> Iterator[tuple[Path, str]]:
    """-> (where it is mounted, the group at its root)"""
    for line in _text(PROC / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, mount, *_ = before.split()
        found, _, options = after.split()[:3]
        if found == kind and (kind == V2_ROOT or controller in options.split(",")):
            yield Path(mount.encode().decode("unicode_escape")), root


def _path_of(kind: str, controller: str) -> str | None:
    for line in _text(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "") if kind == V2_ROOT else (controller in controllers.split(",")):
            return path
    return None


def _figures(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else UNLIMITED


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
