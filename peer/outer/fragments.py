"""A model's parameters as one flat fp32 vector, and that vector cut into parts."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Where each parameter of a model lies in the flat vector.

    Attributes:
        names: parameter names in the model's own order; tied weights appear once, under their first name.
        shapes: one shape per name.
        offsets: index of each parameter's first element in the flat vector.
        numel: length of the flat vector.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> FlatLayout:
        """The layout of all floating-point parameters of `model`, trainable or not."""
        names, shapes, offsets, numel = [], [], [], 0
        for name, parameter in _floating_parameters(model):
            names.append(name)
            shapes.append(tuple(parameter.shape))
            offsets.append(numel)
            numel += parameter.numel()
        return cls(names=tuple(names), shapes=tuple(shapes), offsets=tuple(offsets), numel=numel)

    def copy_to_flat(self, model: torch.nn.Module, out: Tensor) -> None:
        """Copy the model's parameters, of any device and dtype, into `out` (fp32 [numel], CPU)."""
        for parameter, piece in self._pairs(model, out):
            piece.copy_(parameter)

    def copy_from_flat(self, flat: Tensor, model: torch.nn.Module) -> None:
        """Copy `flat` (fp32 [numel], CPU) into the model's parameters, rounding to each parameter's dtype."""
        for parameter, piece in self._pairs(model, flat):
            parameter.copy_(piece)

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` ([numel], any dtype and device) as one view per parameter, in order."""
        assert flat.shape == (self.numel,), f"flat vector is {tuple(flat.shape)}, the layout needs ({self.numel},)"
        return [
            flat[offset : offset + math.prod(shape)].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def merged_ranges(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """[start, stop) of the parameters at `indices` (ascending), adjacent ones as one range."""
        ranges: list[tuple[int, int]] = []
        for index in indices:
            start = self.offsets[index]
            stop = start + math.prod(self.shapes[index])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def digest(self) -> str:
        """SHA-256 of names and shapes as 64 hex digits: equal layouts mean exchangeable flat vectors."""
        described = json.dumps(list(zip(self.names, self.shapes, strict=True)), separators=(",", ":"))
        return hashlib.sha256(described.encode()).hexdigest()

    def _pairs(self, model: torch.nn.Module, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        assert flat.shape == (self.numel,), f"flat vector is {tuple(flat.shape)}, the layout needs ({self.numel},)"
        assert flat.dtype == torch.float32, f"flat vector is {flat.dtype}, must be torch.float32"
        assert flat.device.type == "cpu", f"flat vector is on {flat.device}, must be on the CPU"
        parameters = _floating_parameters(model)
        for (name, parameter), expected, shape, offset in zip(
            parameters, self.names, self.shapes, self.offsets, strict=True
        ):
            assert name == expected, f"parameter {name!r} where the layout has {expected!r}"
            assert parameter.shape == shape, f"{name} has shape {tuple(parameter.shape)}, the layout has {shape}"
            yield parameter.detach(), flat[offset : offset + parameter.numel()].view(shape)


def partition(numel: int, parts: int, block: int) -> tuple[tuple[int, int], ...]:
    """Cut [0, numel) into `parts` contiguous ranges [start, stop) whose inner boundaries are multiples of `block`.

    Sizes differ by at most one block. With fewer blocks than parts, some parts are empty.
    """
    assert numel >= 0, f"numel={numel}"
    assert parts >= 1, f"parts={parts}"
    assert block >= 1, f"block={block}"
    num_blocks = -(-numel // block)
    # Rounding down leaves the last part one of the larger ones, so the short last block never falls to a smaller one.
    cuts = [min(part * num_blocks // parts * block, numel) for part in range(parts + 1)]
    return tuple(itertools.pairwise(cuts))


def _floating_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_floating_point()]
