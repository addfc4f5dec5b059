"""DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1.

    x_i <- anchor, then H steps of AdamW                each peer for itself; its moments stay
    D = mean_i (anchor - x_i)                           the pseudo-gradient
    m <- beta m + D
    anchor <- anchor - eta (D + beta m)                 Nesterov, as torch.optim.SGD has it
"""

import torch


def diloco(replicas, steps, H=500, eta=0.7, beta=0.9):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)
    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        m = beta * m + D
        anchor = anchor - eta * (D + beta * m)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
