"""The moments of an inner optimizer as flat vectors, for recipes whose peers average them (DES-LOC)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout, trained_parameters
from peer.train.adam8bit import AdamW8bit
from peer.train.muon import MuonAdamW
from peer.train.optim import Optimizer
from peer.train.rank_part import RankPart
from peer.train.ranks import ALONE, Ranks
from peer.train.sharding import local

FIELDS = ("exp_avg", "exp_avg_sq")


class InnerMoments:
    """The `LocalParameters` of first or of second moments; zero where the optimizer has none.

    Args:
        second: of which of both.

    Raises:
        UserError: an optimizer whose moments cannot be averaged.
    """

    def __init__(
        self, layout: FlatLayout, model: nn.Module, optimizer: Optimizer, second: bool, ranks: Ranks = ALONE
    ) -> None:
        if isinstance(optimizer, AdamW8bit):
            raise UserError("adam_8bit=True: peers of this run average their moments, in fp32", "leave it off")
        if isinstance(optimizer, torch.optim.SGD):
            raise UserError("inner.optimizer='sgd' has no moments, which this run averages", "set moments: none")
        self._layout, self._model, self._ranks = layout, model, ranks
        self._optimizer, self._second = optimizer, second

    def read(self, out: Tensor, start: int = 0) -> None:
        """Copy this rank's moments to `out`, fp32 [n] on the CPU: of the flat vector from element `start` on."""
        self._part().read(out, start)

    @torch.no_grad()
    def write(self, flat: Tensor, start: int = 0) -> None:
        """The inverse of `read`. A mean of squares that rounding made negative becomes zero."""
        values = self._values()
        self._part(values).write(flat, start)
        if self._second:
            for value in values.values():
                value.clamp_(min=0.0)

    def _part(self, values: dict[str, Tensor] | None = None) -> RankPart:
        return RankPart(self._layout, self._model, self._ranks, self._values() if values is None else values)

    def _values(self) -> dict[str, Tensor]:
        """By name, what this rank holds of each parameter's; an optimizer that has made no step gets its state."""
        momentum = self._optimizer.momentum if isinstance(self._optimizer, MuonAdamW) else {}
        adamw = self._optimizer.adamw if isinstance(self._optimizer, MuonAdamW) else self._optimizer
        found = {}
        for name, parameter in trained_parameters(self._model).items():
            if parameter in momentum:
                moments = momentum[parameter]
                found[name] = torch.zeros_like(moments) if self._second else moments
                continue
            state = adamw.state[parameter]
            if not state:
                device = parameter.device if adamw.defaults.get("fused") else "cpu"
                state["step"] = torch.zeros((), device=device)
                state.update({field: torch.zeros_like(parameter) for field in FIELDS})
            found[name] = local(state[FIELDS[self._second]])
        return found
