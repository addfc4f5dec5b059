"""EDiT's pseudo-gradient penalty: Cheng et al. 2024, arXiv 2412.07210, and its code.

    D_i = anchor - x_i                                  after H steps of AdamW
    per tensor: w_i = exp(-|D_i| / T), 0 if |D_i| > threshold * median |D|
    D = sum_i w_i D_i / sum_i w_i
    D <- D min(1, most / (|D| + 1e-6))                  of all tensors together
    m <- beta m + D
    anchor <- anchor - eta (D + beta m)

The paper drops a worker whose |D_i| is an outlier among its own of earlier rounds; here it is one among the peers'.
"""

import math
from statistics import median

import torch
from common import tensors


def edit(replicas, steps, H=32, penalty=(3.0, 1.0, 10.0), eta=0.7, beta=0.8):
    """Returns the anchor; `penalty`: threshold, T and most."""
    threshold, T, most = penalty
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)
    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = torch.empty_like(anchor)
        moved = zip(*(tensors(anchor - r.x, r.shapes) for r in replicas), strict=True)
        for mean, own in zip(tensors(D, replicas[0].shapes), moved, strict=True):
            norms = [float(d.norm()) for d in own]
            limit = threshold * median(norms)
            w = [math.exp(-norm / T) if norm <= limit else 0.0 for norm in norms]
            mean.copy_(sum(w_i * d for w_i, d in zip(w, own, strict=True)) / sum(w))
        D = D * min(1.0, most / (float(D.norm()) + 1e-6))
        m = beta * m + D
        anchor = anchor - eta * (D + beta * m)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
