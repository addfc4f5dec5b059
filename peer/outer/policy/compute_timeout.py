"""Compute timeouts, and the one that gains the most by measured times (DropCompute, arXiv 2306.10598)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from peer.errors import UserError
from peer.outer.policy.straggler import Close, Rosters, StragglerPolicy, WaitAll, check_seconds


@dataclass(frozen=True, kw_only=True)
class ComputeTimeout(StragglerPolicy):
    """Stop accumulating micro-batches `tau_s` after the step began, then all-reduce (DropCompute, arXiv 2306.10598).

    The round itself waits for all: no peer computes for long after tau.

    Attributes:
        tau_s: infinity is plain data parallelism; None takes `choose_timeout`'s from measured times.
        normalise: divide the sum of gradients by the micro-batches "computed", or by the "fixed" number planned.
    """

    tau_s: float | None = math.inf
    normalise: Literal["computed", "fixed"] = "computed"

    def __post_init__(self) -> None:
        if self.tau_s is not None and not self.tau_s > 0.0:
            raise UserError(f"tau_s={self.tau_s}: must be above 0 seconds", "leave it out to drop nothing")
        if self.normalise not in ("computed", "fixed"):
            raise UserError(f"normalise={self.normalise!r}: must be 'computed' or 'fixed'", "published: 'computed'")

    @property
    def timeout(self) -> ComputeTimeout:
        return self

    def count(self, times: Sequence[float]) -> int:
        """How many of the micro-batches, of these durations in seconds, are finished by tau; may be 0."""
        assert self.tau_s is not None, "choose a timeout first"
        return sum(finished <= self.tau_s for finished in itertools.accumulate(times))

    def divisor(self, counts: Sequence[int], micro_batches: int) -> int:
        """What the sum of all members' micro-batch gradients is divided by; at least 1.

        Args:
            counts: micro-batches computed by each member.
            micro_batches: planned for each member.
        """
        return max(1, sum(counts) if self.normalise == "computed" else len(counts) * micro_batches)

    def next_decision(
        self, expected: Sequence[int], arrived: Mapping[int, float], closed: Rosters = ()
    ) -> Close | None:
        return WaitAll().next_decision(expected, arrived, closed)


def effective_speedup(samples: NDArray[np.float64], communication_s: float, tau_s: NDArray[np.float64]) -> list[float]:
    """Micro-batches per second with a compute timeout, relative to without (arXiv 2306.10598, algorithm 2).

    S(tau) = mean over steps i of (T_i + Tc) / (min(tau, T_i) + Tc) * M_i(tau) / M, where T_i is the slowest worker's
    compute time and M_i(tau) the mean number of micro-batches that a worker has finished by tau.

    Args:
        samples: seconds of each micro-batch, [steps, workers, micro-batches].
        communication_s: Tc, seconds per step that the all-reduce takes.
        tau_s: candidates, [n].
    """
    finished = np.cumsum(samples, axis=2)
    speedups = np.zeros(len(tau_s))
    for step in finished.reshape(len(finished), -1):
        slowest = step.max()
        completed = np.searchsorted(np.sort(step), tau_s, side="right") / step.size
        speedups += (slowest + communication_s) / (np.minimum(tau_s, slowest) + communication_s) * completed
    return [float(speedup) for speedup in speedups / len(finished)]


def choose_timeout(samples: NDArray[np.float64], communication_s: float) -> float:
    """The tau in seconds with the largest `effective_speedup`; infinity where none gains; ties drop less.

    Args:
        samples: measured seconds of each micro-batch, [steps, workers, micro-batches].
        communication_s: seconds per step that the all-reduce takes.

    Between two moments at which a micro-batch ends, a smaller tau is better: those moments are all candidates.

    Raises:
        UserError: samples that are empty, not of three dimensions, or not finite and above 0.
    """
    if samples.ndim != 3 or samples.size == 0:
        raise UserError(f"samples of shape {samples.shape}: must be [steps, workers, micro-batches]", "measure a few")
    if not (np.isfinite(samples).all() and (samples > 0).all()):
        raise UserError("samples: all seconds must be finite and above 0", "leave out steps that failed")
    check_seconds("communication_s", communication_s)
    candidates = np.unique(np.cumsum(samples, axis=2))
    speedups = effective_speedup(samples, communication_s, candidates)
    best = max(range(len(speedups)), key=lambda at: (speedups[at], at))
    return float(candidates[best]) if speedups[best] > 1.0 + 1e-9 else math.inf
