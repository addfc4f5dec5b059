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
from peer.train.sharding import local, own_rows
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
        self._anchors, self._draws = list[Tensor](), Random(0)  # all ranks draw alike

    def begin_round(self, anchor: Tensor) -> None:
        """A new anchor was merged.

        Args:
            anchor: fp32 [P] on the CPU, which stays as it is until the next one; copied where the model is elsewhere.
        """
        if self._rule.reads_anchor:
            views = zip(self._layout.views(anchor), self._parameters, strict=True)
            self._anchors = [own_rows(view, parameter).to(parameter.device) for view, parameter in views]

    @torch.no_grad()
    def on_clipped(self) -> None:
        for gradient, parameter, anchor in self._trained():
            self._rule.on_gradient(gradient, parameter, anchor)

    @torch.no_grad()
    def after_step(self, lr: float) -> None:
        times = self._rule.times(self._draws)
        for _, parameter, anchor in self._trained():
            for _ in range(times):
                self._rule.after_step(parameter, anchor, lr)

    def _trained(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(gradient, parameter, its anchor) of each parameter with a gradient, as vectors of what this rank holds."""
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            if parameter.grad is not None:
                yield local(parameter.grad).view(-1), local(parameter).view(-1), anchor.view(-1)


class SpiderHook(StepHook):
    """Gives the inner optimizer the estimate of a `Spider` in place of the gradient.

    Args:
        layout: of the flat vectors.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout) -> None:
        named = dict(model.named_parameters())
        self._spider, self._parameters = Spider(), [named[name] for name in layout.names]

    def begin_round(self, anchor: Tensor) -> None:  # noqa: ARG002
        """The next step begins with its own gradient again."""
        self._spider.begin_round()

    @torch.no_grad()
    def on_gradient(self, backward: Callable[[], object]) -> None:
        gradient, here = self._gradient(), torch.cat([local(parameter).flatten() for parameter in self._parameters])

        def gradient_at(there: Tensor) -> Tensor:
            self._move_to(there)
            for parameter in self._parameters:
                parameter.grad = None
            with torch.enable_grad():
                backward()
            self._move_to(here)
            return self._gradient()

        self._spider.on_gradient(gradient, here, here, gradient_at)
        for parameter, values in self._cut(gradient):
            if parameter.grad is not None:
                local(parameter.grad).copy_(values)

    def forget(self) -> None:
        self._spider.begin_round()

    def _gradient(self) -> Tensor:
        """fp32, of all that this rank holds; zeros for what has none."""
        return torch.cat([
            torch.zeros_like(local(parameter)).flatten() if parameter.grad is None else local(parameter.grad).flatten()
            for parameter in self._parameters
        ])  # fmt: skip

    def _cut(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, its values) of a vector of all that this rank holds."""
        owned = [local(parameter) for parameter in self._parameters]
        values = torch.split(flat, [own.numel() for own in owned])
        shaped = (one.view(own.shape) for one, own in zip(values, owned, strict=True))
        return zip(self._parameters, shaped, strict=True)

    def _move_to(self, flat: Tensor) -> None:
        for parameter, values in self._cut(flat):
            local(parameter).copy_(values)


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
