"""DiLoCo with restarts of its momentum: Topollai et al. 2026, arXiv 2605.28585.

    D = mean_i (anchor - x_i)                           after H steps of AdamW
    every K rounds: m <- 0
    m <- beta m + D
    anchor <- anchor - eta (D + beta m)

The paper's m is (1 - beta) times this one, and its rate, .9, is eta / (1 - beta).
"""

import torch


def restarted_diloco(replicas, steps, H=128, eta=0.27, beta=0.7, K=3):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)
    for t in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        m = D if t % K == 0 else beta * m + D
        anchor = anchor - eta * (D + beta * m)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
