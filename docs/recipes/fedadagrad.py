"""FedAdagrad: Reddi et al. 2021, arXiv 2003.00295, algorithm 2. The paper's Delta is -D.

    D = mean_i (anchor - x_i)                           after H inner steps of each peer
    v <- v + D^2                                        v starts at tau^2
    anchor <- anchor - lr D / (sqrt v + tau)
"""

import torch


def fedadagrad(replicas, steps, H=300, lr=0.1, tau=1e-3):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    v = torch.full_like(anchor, tau**2)
    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        v = v + D**2
        anchor = anchor - lr * D / (v.sqrt() + tau)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
