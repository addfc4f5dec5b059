"""Losses far above what the last steps had."""

from __future__ import annotations

import logging
import math

log = logging.getLogger(__name__)
SETTLED_STEPS = 50  # seen before a bound means anything
MEMORY_STEPS = 100  # of the running mean and variance
DEVIATIONS = 6.0
LEAST_RISE = 0.1  # nats: below that it is no spike, however steady the losses were


class SpikeWatch:
    """Reports a loss above mean + 6 standard deviations of the last hundred steps or so, both exponentially weighted.

    Attributes:
        count: how many were seen.
    """

    def __init__(self) -> None:
        self.count = 0
        self._steps = 0
        self._mean = self._variance = 0.0
        self._above = False

    def see(self, loss: float) -> None:
        """Take the loss of one more step; the first of neighbouring spikes is reported."""
        bound = self._mean + max(LEAST_RISE, DEVIATIONS * math.sqrt(self._variance))
        above = self._steps >= SETTLED_STEPS and loss > bound
        if above:
            self.count += 1
            if not self._above:
                log.warning("loss spike: %.3f, above %.3f (the last steps had %.3f)", loss, bound, self._mean)
        self._above = above
        self._steps += 1
        weight = max(1.0 / self._steps, 1.0 / MEMORY_STEPS)
        change = loss - self._mean
        self._mean += weight * change
        self._variance = (1.0 - weight) * (self._variance + weight * change * change)
