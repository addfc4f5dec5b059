"""Where a recipe acts on the steps of a trainer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from peer.train.batch import Batch
from peer.train.compute_limit import ComputeLimit


class StepHook:
    """What a recipe adds to the steps of a `Trainer`; by itself, it changes nothing.

    Attributes:
        limit: stops a step at its time limit, where the recipe has one.
    """

    limit: ComputeLimit | None = None

    def begin_round(self, anchor: Tensor) -> None:
        """The model has taken up a new anchor (fp32 [P] on the CPU, unchanged until the next), or went back to one."""

    def on_gradient(self, backward: Callable[[], object]) -> None:
        """Change the gradients before they are clipped.

        Args:
            backward: writes the gradients of this batch at the parameters as they are then, where there are none.
        """

    def forget(self) -> None:
        """The last gradients were not finite: what is kept of them is void."""

    def on_clipped(self) -> None:
        """Change the gradients before the optimizer sees them; not called for a step that is skipped."""

    def after_step(self, lr: float) -> None:
        """Change the parameters after the optimizer's step; not called for a step that is skipped."""

    def end(self, batch: Batch, lr: float) -> None:
        """The step is over."""
