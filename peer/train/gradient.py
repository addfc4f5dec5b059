"""The gradient of one batch as a flat vector, in place of a step."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peer.outer.state.flat_layout import FlatLayout
from peer.train.rank_part import RankPart
from peer.train.ranks import ALONE, Ranks
from peer.train.sharding import local


class ReadsFlat(Protocol):
    """Copies a flat vector from where its parts are."""

    def read(self, out: Tensor, start: int) -> None:
        """Into fp32 [n] in RAM, from element `start` on."""


class KeptGradient(torch.optim.Optimizer):
    """Makes no step: keeps the gradients, for recipes in which the outer optimizer makes every step.

    Args:
        model: on its device; where ranks share it, each keeps the gradient of its part.
        layout: of the flat vector; what is not trained has a gradient of zero.
        scaled: by the rate of the step.
        ranks: of this peer.

    Attributes:
        own: reads what this process has kept.
        parts: reads what all have kept; until there is more, `own`.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, *, scaled: bool = True, ranks: Ranks = ALONE) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        super().__init__(named, {"lr": 1.0})
        self._scaled, self._made = scaled, False
        kept = {name: torch.zeros(local(parameter).shape) for name, parameter in named}
        self._pairs = [(parameter, kept[name]) for name, parameter in named]
        self.own = RankPart(layout, model, ranks if ranks.sharded else ALONE, kept)
        self.parts: ReadsFlat = self.own

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Keep the gradient."""
        rate = self.param_groups[0]["lr"] if self._scaled else 1.0
        for parameter, kept in self._pairs:
            if parameter.grad is None:
                kept.zero_()
            else:
                kept.copy_(local(parameter.grad)).mul_(rate)
        self._made = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what was kept if no step was made since the last time."""
        if not self._made:
            for _, kept in self._pairs:
                kept.zero_()
        self._made = False
        super().zero_grad(set_to_none)

    def take(self, out: Tensor) -> None:
        """Copy what was kept to `out`, fp32 [P] on the CPU: zeros where the last step was skipped."""
        self.parts.read(out, 0)
