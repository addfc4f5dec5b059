"""In which numbers a step computes. Weights, gradients, moments and the loss are fp32 whatever is chosen here."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from peer.errors import UserError

log = logging.getLogger(__name__)
Precision = Literal["fp32", "bf16", "fp16"]
FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000  # without overflow, until a doubled scale is tried; as torch's GradScaler


def autocast(device: torch.device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Makes the context of a forward pass: matrix products of this precision.

    Raises:
        UserError: the device cannot compute in it.
    """
    if precision == "fp32":
        return nullcontext
    able = _has_bf16 if precision == "bf16" else _has_fp16
    if not able(device):
        other = "use --fp16 instead" if precision == "bf16" and _has_fp16(device) else "leave it off"
        raise UserError(f"{precision}=True: {_name_of(device)} cannot compute in {precision}", other)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return partial(torch.autocast, device.type, dtype=dtype)


def allow_tf32(wanted: bool) -> None:
    """Let CUDA multiply fp32 matrices in TF32 (10 bits of mantissa) or not; no other device has it."""
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted


class LossScale:
    """Keeps fp16 gradients from vanishing: the loss is multiplied by a power of two, the gradients divided by it.

    Attributes:
        value: halved at each overflow, doubled after `GROWTH_STEPS` steps without one.
    """

    def __init__(self, value: float = FIRST_SCALE) -> None:
        self.value = value
        self._good_steps = 0

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the scale."""
        torch._foreach_mul_(gradients, 1.0 / self.value)

    def shrink(self) -> bool:
        """After an overflow: halve the scale; False if it cannot be smaller."""
        self._good_steps = 0
        if self.value <= 1.0:
            return False
        self.value /= 2.0
        return True

    def grow(self) -> None:
        """After a good step."""
        self._good_steps += 1
        if self._good_steps % GROWTH_STEPS == 0:
            self.value *= 2.0


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    # oneDNN's own test: without AVX-512 (or Arm's bf16) it would convert to fp32 and back, slower than fp32.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_fp16(device: torch.device) -> bool:
    return device.type in ("cuda", "mps", "cpu")


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"
