"""The inner optimizers on a flat vector: one replica's parameters, all tensors at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peer.outer.optim.every_step import is_hidden_matrix
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.train.muon import MuonMatrices


class InnerOptimizer(Protocol):
    """Changes `parameters` (fp32 [P], given at construction) in place."""

    def step(self, gradient: Tensor, lr: float) -> None:
        """One inner step along `gradient` (fp32 [P], already clipped), which stays as it is."""

    def copy_from(self, other: InnerOptimizer) -> None:
        """Take over the state of a peer that makes the same steps."""

    @property
    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Its first and its second moments; both empty where it has none."""


class FlatSgd:
    """x <- x - lr g."""

    def __init__(self, parameters: Tensor) -> None:
        self._parameters = parameters

    def step(self, gradient: Tensor, lr: float) -> None:
        self._parameters.sub_(gradient, alpha=lr)

    def copy_from(self, other: InnerOptimizer) -> None:
        """Nothing to take over."""

    @property
    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        return [], []


class FlatAdamW:
    """AdamW (arXiv 1711.05101), equal to `torch.optim.AdamW` with decay on matrices only.

    Args:
        parameters: fp32 [P].
        matrices: [start, stop) of what decays.
        inner: betas, eps, weight decay.
        covers: [start, stop) of what this optimizer changes; None for everything.
    """

    def __init__(
        self,
        parameters: Tensor,
        matrices: Sequence[tuple[int, int]],
        inner: InnerSpec,
        covers: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._ranges = list(covers) if covers is not None else [(0, parameters.numel())]
        self._views = [parameters[start:stop] for start, stop in self._ranges]
        self._decaying = [parameters[start:stop] for start, stop in matrices]
        self._inner = inner
        self.first = [torch.zeros_like(view) for view in self._views]
        self.second = [torch.zeros_like(view) for view in self._views]
        self.steps = 0

    def step(self, gradient: Tensor, lr: float) -> None:
        beta1, beta2 = self._inner.betas
        self.steps += 1
        correction = math.sqrt(1.0 - beta2**self.steps)
        rate = lr / (1.0 - beta1**self.steps)
        if self._inner.weight_decay:
            for view in self._decaying:
                view.mul_(1.0 - lr * self._inner.weight_decay)
        for (start, stop), view, first, second in zip(
            self._ranges, self._views, self.first, self.second, strict=True
        ):
            own = gradient[start:stop]
            first.lerp_(own, 1.0 - beta1)
            second.mul_(beta2).addcmul_(own, own, value=1.0 - beta2)
            view.addcdiv_(first, second.sqrt().div_(correction).add_(self._inner.eps), value=-rate)

    def copy_from(self, other: InnerOptimizer) -> None:
        assert isinstance(other, FlatAdamW)
        self.steps = other.steps
        for mine, theirs in zip([*self.first, *self.second], [*other.first, *other.second], strict=True):
            mine.copy_(theirs)

    @property
    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.first, self.second


class FlatMuon:
    """Muon on the hidden matrices, AdamW on embeddings, heads and vectors (see `peer.train.muon`)."""

    def __init__(self, parameters: Tensor, layout: FlatLayout, inner: InnerSpec) -> None:
        hidden = [
            index
            for index, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True))
            if is_hidden_matrix(name, shape)
        ]
        views, shapes = layout.views(parameters), {index: layout.shapes[index] for index in hidden}
        self._groups = []
        for shape in sorted(set(shapes.values())):
            members = [index for index in hidden if shapes[index] == shape]
            weights = [views[index] for index in members]
            self._groups.append((members, MuonMatrices(weights, inner.muon_momentum, inner.weight_decay)))
        rest = [index for index in range(len(layout.names)) if index not in shapes]
        decaying = [index for index in rest if len(layout.shapes[index]) >= 2]
        self._ratio = inner.muon_learning_rate_ratio
        self._layout = layout
        self._adamw = FlatAdamW(
            parameters, layout.merged_ranges(decaying), inner, covers=layout.merged_ranges(rest)
        )

    def step(self, gradient: Tensor, lr: float) -> None:
        views = self._layout.views(gradient)
        for members, matrices in self._groups:
            matrices.step([views[index] for index in members], lr * self._ratio)
        self._adamw.step(gradient, lr)

    def copy_from(self, other: InnerOptimizer) -> None:
        assert isinstance(other, FlatMuon)
        self._adamw.copy_from(other._adamw)
        for (_, mine), (_, theirs) in zip(self._groups, other._groups, strict=True):
            mine.buffer_brc.copy_(theirs.buffer_brc)

    @property
    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        return [*self._adamw.first, *(group.buffer_brc for _, group in self._groups)], self._adamw.second


def inner_optimizer(kind: str, layout: FlatLayout, inner: InnerSpec) -> Callable[[Tensor], InnerOptimizer]:
    """A builder of inner optimizers over a replica's parameters: `adamw`, `muon` or `sgd`."""
    matrices = layout.merged_ranges([index for index, shape in enumerate(layout.shapes) if len(shape) >= 2])

    def build(parameters: Tensor) -> InnerOptimizer:
        if kind == "muon":
            return FlatMuon(parameters, layout, inner)
        return FlatSgd(parameters) if kind == "sgd" else FlatAdamW(parameters, matrices, inner)

    return build
