"""Where to compute: device, threads, and the memory that is free there."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

from peer.errors import UserError
from peer.system import resources
from peer.system.resources import usable_cores


def pick_device(name: str) -> torch.device:
    """`auto` (cuda, then mps, then cpu), or a device by torch's name such as `cuda:1`.

    Raises:
        UserError: not a device's name, or a device that this machine or this torch does not have.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    hint = "use auto, cpu, cuda, cuda:<number> or mps"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name!r} is not a device", hint) from None
    present = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = present.get(device.type, 0)
    if (device.index or 0) >= count:
        raise UserError(f"device={name!r} is not available: this torch sees {count} {device.type} devices", hint)
    return device


def device_name(device: torch.device) -> str:
    """What people call it: `NVIDIA H100 80GB HBM3`, `AMD EPYC 7763, 8 cores`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.processor() or platform.machine()} ({device.type})"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {usable_cores()} cores"
    return f"{platform.machine()} CPU, {usable_cores()} cores"


def set_threads(count: int | None) -> None:
    """Let torch use `count` threads within one operation; None: its own choice, but no more than this process may use.

    Raises:
        UserError: fewer than one, or more than the cores that this process may use.
    """
    cores = usable_cores()
    if count is not None and not 1 <= count <= cores:
        raise UserError(f"torch_threads={count}: must be between 1 and the {cores} cores that this process may use")
    torch.set_num_threads(count or min(cores, torch.get_num_threads()))


def available_memory(device: torch.device) -> int:
    """Free bytes on a CUDA device, else available RAM (an mps device shares it), see `peer.system.resources`."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes
    return resources.available_memory()
