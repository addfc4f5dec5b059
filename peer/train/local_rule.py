"""A recipe's local rule in the inner loop of a model, on the device of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor, nn

from peer.outer.policy.local_rules import LocalRule, Spider
from peer.outer.state.flat_layout import FlatLayout
from peer.train.batch import Batch
from peer.train.hook import StepHook
from peer.train.optim import Optimizer, load_optimizer_tensors, optimizer_tensors
from peer.train.step import Trainer


class RuleHook(StepHook):
    """Applies a rule that changes each value by itself, parameter by parameter.

    Args:
        layout: of the flat vectors.
    """

    def __init__(self, rule: LocalRule, model: nn.Module, layout: FlatLayout) -> None:
        named = dict(model.named_parameters())
        self._rule, self._layout = rule, layout
        self._parameters = [named[name] for name in layout.names]
        self._anchor, self._draws = torch.empty(0), Random(0)

    def begin_round(self, anchor: Tensor) -> None:
        """A new anchor was merged.

        Args:
            anchor: fp32 [P] on the CPU, which stays as it is until the next one; copied where the model is elsewhere.
        """
        if self._rule.reads_anchor:
            self._anchor = anchor.to(self._parameters[0].device)

    @torch.no_grad()
    def on_clipped(self) -> None:
        for gradient, local, anchor in self._trained():
            self._rule.on_gradient(gradient, local, anchor)

    @torch.no_grad()
    def after_step(self, lr: float) -> None:
        times = self._rule.times(self._draws)
        for _, local, anchor in self._trained():
            for _ in range(times):
                self._rule.after_step(local, anchor, lr)

    def _trained(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(gradient, parameter, its anchor) of each parameter with a gradient, as vectors."""
        anchors = self._layout.views(self._anchor)
        for parameter, anchor in zip(self._parameters, anchors, strict=True):
            if parameter.grad is not None:
                yield parameter.grad.view(-1), parameter.view(-1), anchor.view(-1)


class SpiderHook(StepHook):
    """Gives the inner optimizer the estimate of a `Spider` in place of the gradient.

    Args:
        layout: of the flat vectors.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout) -> None:
        named = dict(model.named_parameters())
        self._layout, self._spider = layout, Spider()
        self._parameters = [named[name] for name in layout.names]

    def begin_round(self, anchor: Tensor) -> None:  # noqa: ARG002
        """The next step begins with its own gradient again."""
        self._spider.begin_round()

    @torch.no_grad()
    def on_gradient(self, backward: Callable[[], object]) -> None:
        gradient, local = self._gradient(), torch.cat([parameter.flatten() for parameter in self._parameters])

        def gradient_at(there: Tensor) -> Tensor:
            self._move_to(there)
            for parameter in self._parameters:
                parameter.grad = None
            with torch.enable_grad():
                backward()
            self._move_to(local)
            return self._gradient()

        self._spider.on_gradient(gradient, local, local, gradient_at)
        for parameter, view in zip(self._parameters, self._layout.views(gradient), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(view)

    def forget(self) -> None:
        self._spider.begin_round()

    def _gradient(self) -> Tensor:
        """fp32 [P], zeros for what has none."""
        return torch.cat([
            torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
            for parameter in self._parameters
        ])  # fmt: skip

    def _move_to(self, flat: Tensor) -> None:
        for parameter, view in zip(self._parameters, self._layout.views(flat), strict=True):
            parameter.copy_(view)


class ReplayHook(SpiderHook):
    """Makes every step a second time on a model that began at the anchor before (FedGLOMO, arXiv 2012.04061).

    Args:
        optimizer: of the model; at every new anchor the second one takes over its state.
        second: builds what makes the steps of the second model, given its learning rate.
    """

    def __init__(
        self, model: nn.Module, layout: FlatLayout, optimizer: Optimizer,
        second: Callable[[Callable[[], float]], Trainer],
    ) -> None:  # fmt: skip
        super().__init__(model, layout)
        self._optimizer, self._rate = optimizer, 0.0
        self._second = second(lambda: self._rate)

    def begin_round(self, anchor: Tensor) -> None:
        super().begin_round(anchor)
        self._second.hook.begin_round(anchor)
        load_optimizer_tensors(self._second.optimizer, optimizer_tensors(self._optimizer))

    def end(self, batch: Batch, lr: float) -> None:
        self._rate = lr
        self._second.step(batch)
