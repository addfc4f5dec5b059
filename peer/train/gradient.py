"""The gradient of one batch as a flat vector, in place of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peer.outer.state.flat_layout import FlatLayout


class KeptGradient(torch.optim.Optimizer):
    """Makes no step: keeps the gradients, for recipes in which the outer optimizer makes every step.

    Args:
        layout: of the flat vector; what is not trained has a gradient of zero.
        scaled: by the rate of the step.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, *, scaled: bool = True) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        super().__init__(named, {"lr": 1.0})
        self._scaled = scaled
        self._flat = torch.zeros(layout.numel)
        views = dict(zip(layout.names, layout.views(self._flat), strict=True))
        self._pairs = [(parameter, views[name]) for name, parameter in named]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Keep the gradient."""
        rate = self.param_groups[0]["lr"] if self._scaled else 1.0
        self._flat.zero_()
        for parameter, kept in self._pairs:
            if parameter.grad is not None:
                kept.copy_(parameter.grad).mul_(rate)

    def take(self, out: Tensor) -> None:
        """Move what was kept to `out`, fp32 [P] on the CPU: zeros where no step was made since the last time."""
        out.copy_(self._flat)
        self._flat.zero_()
