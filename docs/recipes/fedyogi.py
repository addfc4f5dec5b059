"""FedYogi: Reddi et al. 2021, arXiv 2003.00295, algorithm 2. The paper's Delta is -D.

    D = mean_i (anchor - x_i)                           after H inner steps of each peer
    m <- b1 m + (1 - b1) D
    v <- v - (1 - b2) D^2 sign(v - D^2)                 v starts at tau^2
    anchor <- anchor - lr m / (sqrt v + tau)            no bias correction

Adam's v shrinks by a share of v, Yogi's by a share of D^2: it forgets a large D no faster than it learnt it.
"""

import torch


def fedyogi(replicas, steps, H=300, lr=0.01, b1=0.9, b2=0.99, tau=1e-3):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m, v = torch.zeros_like(anchor), torch.full_like(anchor, tau**2)
    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        m = b1 * m + (1 - b1) * D
        v = v - (1 - b2) * D**2 * torch.sign(v - D**2)
        anchor = anchor - lr * m / (v.sqrt() + tau)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
