"""Block-random sparsification: Eghlidi and Jaggi 2020, arXiv 2009.09271. Every step; one stretch, no positions.

    e_i <- e_i + clip(g_i)
    send one stretch of 1% of e_i, the same on all peers;  it becomes 0 in e_i
    g = mean_i of what was sent;  x <- AdamW(x, g)      the same on all peers

place(t): where the stretch of step t = 1, 2, ... begins, drawn from a seed that all peers know; the ends of the vector
meet.
"""

import math

import torch
from common import clip


def sparse_block(replicas, steps, place, ratio=0.01):
    """Returns the parameters that all hold."""
    e = [torch.zeros_like(r.x) for r in replicas]
    n = len(e[0])
    for t in range(1, steps + 1):
        stretch = (place(t) + torch.arange(math.ceil(ratio * n))) % n
        g = torch.zeros(n)
        for e_i, r in zip(e, replicas, strict=True):
            e_i += clip(r.gradient())
            g[stretch] += e_i[stretch] / len(replicas)
            e_i[stretch] = 0.0
        for r in replicas:
            r.update(g)
    return replicas[0].x
