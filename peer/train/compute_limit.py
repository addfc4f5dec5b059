"""Stops a step at its time limit: micro-batches that would end later are dropped (DropCompute, arXiv 2306.10598)."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from peer.outer.policy.compute_timeout import choose_timeout
from peer.outer.policy.straggler import ComputeTimeout
from peer.system.clock import Clock

log = logging.getLogger(__name__)
MICRO_BATCHES = 8  # of a step, unless the person says how large one is
TIMED_STEPS = 48  # from which a limit is chosen
WORKERS = 8  # whose steps those are taken for: the paper's workers draw their times alike


class ComputeLimit:
    """The time limit of the steps of one peer, its own or chosen from the first steps.

    Args:
        policy: the recipe's; with `tau_s` None the limit is chosen from measured times of this peer's micro-batches.
        device: where they are computed.
        passes: forward and backward passes that a step makes over each micro-batch; the first is timed for all.
        clock: seconds, monotonic.

    Attributes:
        tau_s: None as long as it is not chosen.
        fixed: whether what was dropped counts as zeros in the mean.
    """

    def __init__(
        self, policy: ComputeTimeout, device: torch.device, passes: int = 1, clock: Clock = time.perf_counter
    ) -> None:
        self.tau_s, self.fixed = policy.tau_s, policy.fixed
        self._device, self._passes, self._clock = device, passes, clock
        self._times, self._own = list[list[float]](), list[float]()
        self._waited_s = np.inf  # the shortest pause between two steps: what the exchange takes the slowest peer
        self._began = self._ended = clock()

    @classmethod
    def of(cls, policy: ComputeTimeout | None, device: torch.device, passes: int = 1) -> ComputeLimit | None:
        """None for a recipe without one."""
        return None if policy is None else cls(policy, device, passes)

    def begin(self) -> None:
        """A step begins."""
        self._waited_s = min(self._waited_s, self._clock() - self._ended) if self._times else np.inf
        self._began, self._own = self._clock(), []

    def allows_another(self) -> bool:
        """Whether one more micro-batch is expected to end in time; called after each."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ended = self._clock()
        passed = self._ended - self._began
        self._own.append(passed - sum(self._own))
        return self.tau_s is None or self._passes * passed * (1 + 1 / len(self._own)) <= self.tau_s

    def end(self) -> None:
        """A step has ended; after enough of them the limit is chosen."""
        if self.tau_s is not None:
            return
        self._times.append(self._own)
        if len(self._times) == TIMED_STEPS + 1:  # the first one is not like the others
            planned = min(len(own) for own in self._times)
            samples = np.array([own[:planned] for own in self._times[1:]]).reshape(-1, WORKERS, planned)
            self.tau_s = choose_timeout(np.maximum(samples, 1e-9), self._waited_s)
            log.info("a step stops accumulating micro-batches after %.3g s", self.tau_s)


def micro_batch_of(policy: ComputeTimeout | None, batch_sequences: int) -> int:
    """Sequences of a forward pass, unless the person says otherwise: few with a limit, so that some can be dropped."""
    return batch_sequences if policy is None else max(1, batch_sequences // MICRO_BATCHES)
