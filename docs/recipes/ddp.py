"""Data parallelism: the baseline of every comparison.

    g = mean_i g_i                      at every step
    x <- AdamW(x, clip(g))              the same on all peers

As one peer with a batch as large as all batches together.
"""

from common import clip


def ddp(replicas, steps):
    """Returns the parameters that all hold."""
    for _ in range(steps):
        g = sum(r.gradient() for r in replicas) / len(replicas)
        for r in replicas:
            r.update(clip(g))
    return replicas[0].x
