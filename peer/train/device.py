"""Where to compute: device, threads, precision and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from peer.errors import UserError
from peer.system import resources
from peer.system.resources import usable_cores

# fp32 weights, gradients and two Adam moments on the device; anchor, momentum and a snapshot in the agent's RAM.
DEVICE_BYTES_PER_PARAMETER = 16
AGENT_BYTES_PER_PARAMETER = 12

_GIB = 2**30


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


def set_threads(count: int | None) -> None:
    """Let torch use `count` threads within one operation; None: its own choice, but no more than this process may use.

    Raises:
        UserError: fewer than one, or more than the cores that this process may use.
    """
    cores = usable_cores()
    if count is not None and not 1 <= count <= cores:
        raise UserError(f"torch_threads={count}: must be between 1 and the {cores} cores that this process may use")
    torch.set_num_threads(count or min(cores, torch.get_num_threads()))


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """bfloat16 matrix products on a CUDA device; weights, gradients and the loss stay fp32.

    Raises:
        UserError: bf16 asked for on another kind of device.
    """
    if not bf16:
        return nullcontext()
    if device.type != "cuda":
        raise UserError(f"bf16=True needs a CUDA device; this peer trains on {device}", "leave bf16 off")
    return torch.autocast("cuda", dtype=torch.bfloat16)


def available_memory(device: torch.device) -> int:
    """Free bytes on a CUDA device, else available RAM (an mps device shares it), see `peer.system.resources`."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes
    return resources.available_memory()


def check_fits(
    parameters: int,
    device: torch.device,
    available_bytes: Callable[[torch.device], int] = available_memory,
    activation_bytes: int = 0,
) -> None:
    """Refuse a model that cannot fit, before any of it is allocated.

    Args:
        activation_bytes: what a step keeps there beside the parameters.
        available_bytes: free bytes of a device.

    Raises:
        UserError: GiB needed and GiB free, on the device or in RAM.
    """
    ram = torch.device("cpu")
    if device.type == "cuda":
        needs = [(device, DEVICE_BYTES_PER_PARAMETER), (ram, AGENT_BYTES_PER_PARAMETER)]
    else:
        needs = [(ram, DEVICE_BYTES_PER_PARAMETER + AGENT_BYTES_PER_PARAMETER)]
    for place, bytes_per_parameter in needs:
        check_memory(parameters, bytes_per_parameter, place, available_bytes)
    needed, free = parameters * needs[0][1] + activation_bytes, available_bytes(device)
    if needed > free:
        raise UserError(
            f"a step needs {needed / _GIB:.2f} GiB, {activation_bytes / _GIB:.2f} GiB of them for activations; "
            f"{free / _GIB:.2f} GiB free on {device}",
            "lower --per-device-train-batch-size, free memory, or use a larger machine",
        )


def check_memory(
    parameters: int,
    bytes_per_parameter: int,
    place: torch.device,
    available_bytes: Callable[[torch.device], int] = available_memory,
) -> None:
    """Refuse what needs more than the free memory of one place.

    Raises:
        UserError: GiB needed and GiB free.
    """
    needed, free = parameters * bytes_per_parameter, available_bytes(place)
    if needed > free:
        raise UserError(
            f"a model of {parameters / 1e6:.1f}M parameters needs {needed / _GIB:.2f} GiB; "
            f"{free / _GIB:.2f} GiB free on {place}",
            "free memory (or raise the limit of its container), use a larger machine, or choose a smaller model",
        )
