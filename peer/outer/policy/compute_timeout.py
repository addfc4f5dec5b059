"""The compute timeout that gains the most, from measured times (DropCompute, arXiv 2306.10598)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from peer.errors import UserError
from peer.outer.policy.straggler import check_seconds


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
