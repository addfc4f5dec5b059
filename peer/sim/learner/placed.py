"""A vector with two homes: steps change it on a device, rounds in RAM."""

from __future__ import annotations

import torch
from torch import Tensor


class Placed:
    """One vector, copied when the other home asks for it; on the CPU both homes are one tensor.

    What one of them gives may be changed in place until the other is asked for, and is outdated from then on.

    Args:
        in_ram: fp32 [P], the values.
        on_device: fp32 [P], the same values.
    """

    def __init__(self, in_ram: Tensor, on_device: Tensor) -> None:
        self._in_ram, self._on_device = in_ram, on_device
        self._newest = in_ram

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Placed:
        """`values` (fp32 [P] in RAM; on the CPU they are kept, not copied) and their home on a device."""
        in_ram = values.pin_memory() if device.type == "cuda" else values
        return cls(in_ram, values.to(device))

    @property
    def in_ram(self) -> Tensor:
        """For a round."""
        return self._at(self._in_ram)

    @property
    def on_device(self) -> Tensor:
        """For a step; the same tensor each time, so that an optimizer may keep views of it."""
        return self._at(self._on_device)

    def _at(self, home: Tensor) -> Tensor:
        if self._newest is not home:
            home.copy_(self._newest)
            self._newest = home
        return home
