"""DropCompute: Giladi et al. 2023, arXiv 2306.10598, algorithms 1 and 2. No peer computes long after tau.

    g_i: the sum of micro-batch gradients until tau seconds after the step began
    g = sum_i g_i / number of micro-batches computed by all
    x <- AdamW(x, clip(g))                              the same on all peers

    tau: the argmax over tau of the mean over steps of   (T + Tc) / (min(tau, T) + Tc) * M(tau) / M
    T: compute time of the slowest peer, Tc: of the all-reduce, M(tau): micro-batches done by tau

seconds[t][i]: of each of the M micro-batches of replica i at step t; the first one is always finished.
"""

import math
from itertools import accumulate

from common import clip


def dropcompute(replicas, steps, seconds, tau=None, measured=(), Tc=0.0):
    """measured: as seconds, to choose tau from. Returns the parameters that all hold."""
    if tau is None:
        ends = [[list(accumulate(peer)) for peer in step] for step in measured]

        def speedup(tau):
            total = 0.0
            for step in ends:
                flat = [end for peer in step for end in peer]
                T, done = max(flat), sum(end <= tau for end in flat) / len(flat)
                total += (T + Tc) / (min(tau, T) + Tc) * done
            return total / len(ends)

        best = max((speedup(end), end) for step in ends for peer in step for end in peer)
        tau = best[1] if best[0] > 1 + 1e-9 else math.inf
    for t in range(steps):
        g, computed = 0.0, 0
        for i, r in enumerate(replicas):
            batch, M = next(r.batches), len(seconds[t][i])
            done = max(1, sum(end <= tau for end in accumulate(seconds[t][i])))
            part = batch[: round(done / M * len(batch))]
            g, computed = g + len(part) * r.gradient(part), computed + len(part)
        for r in replicas:
            r.update(clip(g / computed))
    return replicas[0].x
