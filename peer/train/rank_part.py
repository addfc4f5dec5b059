"""What one rank copies between a model's flat vector and its device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from peer.outer.state.flat_layout import FlatLayout
from peer.train.ranks import Ranks
from peer.train.sharding import gather_no_more, local


class RankPart:
    """The parameters of a model that a rank holds, as ranges of the flat vector.

    Where each rank holds all of them, the kth rank on the machine of rank 0 writes the kth part of a vector.

    Args:
        model: on its device; sharded already where it is to be.
        values: by name what this rank holds of each parameter; None: the parameters themselves.
    """

    def __init__(
        self, layout: FlatLayout, model: nn.Module, ranks: Ranks, values: Mapping[str, Tensor] | None = None
    ) -> None:
        self._ranks, self._model = ranks, model
        named = dict(model.named_parameters())
        self._held: list[tuple[int, Tensor]] = []
        for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True):
            parameter = named[name].detach()
            if isinstance(parameter, DTensor):
                rows = -(-shape[0] // ranks.count)
                offset += min(ranks.rank * rows, shape[0]) * math.prod(shape[1:])
            own = local(parameter) if values is None else values[name]
            assert own.is_contiguous(), f"{name} is not contiguous"
            self._held.append((offset, own.view(-1)))

    @torch.no_grad()
    def read(self, out: Tensor, start: int) -> None:
        """Copy what this rank contributes to `out`, fp32 [n] in RAM: the flat vector from element `start` on."""
        gather_no_more(self._model)
        first, stop = self._own(out.numel())
        for begin, values in self._within(start + first, start + stop):
            out[begin - start : begin - start + values.numel()].copy_(values)

    @torch.no_grad()
    def write(self, flat: Tensor, start: int) -> None:
        """Copy all that this rank holds of `flat`, fp32 [n] in RAM, to its parameters."""
        gather_no_more(self._model)
        for begin, values in self._within(start, start + flat.numel()):
            values.copy_(flat[begin - start : begin - start + values.numel()])

    def _own(self, numel: int) -> tuple[int, int]:
        if self._ranks.sharded:
            return 0, numel
        rank, count = self._ranks.rank, self._ranks.near
        if rank >= count:
            return 0, 0
        return rank * numel // count, (rank + 1) * numel // count

    def _within(self, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(place, values) of what is held of a range of the flat vector."""
        for offset, values in self._held:
            begin, end = max(first, offset), min(stop, offset + values.numel())
            if begin < end:
                yield begin, values[begin - offset : end - offset]
