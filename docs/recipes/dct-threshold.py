"""Dynamic communication thresholding: Gupta et al. 2020, arXiv 2010.08899, section 3. Every step; a lasting threshold.

    e_i <- e_i + clip(g_i)
    send the values with |e_i| >= threshold_i;  they become 0 in e_i
    threshold_i: the k-th magnitude, k = 1%, found again every L steps, or when more than 2 k values pass
    g = mean_i of what was sent;  x <- AdamW(x, g)      the same on all peers
"""

import math

import torch
from common import clip


def dct_threshold(replicas, steps, ratio=0.01, L=32):
    """Returns the parameters that all hold."""
    e = [torch.zeros_like(r.x) for r in replicas]
    threshold = [math.inf] * len(replicas)
    k = math.ceil(ratio * len(replicas[0].x))
    for t in range(steps):
        g = torch.zeros_like(e[0])
        for i, r in enumerate(replicas):
            e[i] = e[i] + clip(r.gradient())
            if t % L == 0 or (e[i].abs() >= threshold[i]).sum() > 2 * k:
                threshold[i] = e[i].abs().topk(k).values[-1]
            sent = torch.where(e[i].abs() >= threshold[i], e[i], 0.0)
            e[i] = e[i] - sent
            g += sent / len(replicas)
        for r in replicas:
            r.update(g)
    return replicas[0].x
