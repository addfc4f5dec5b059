"""FedGLOMO: Das et al. 2022, arXiv 2012.04061, algorithms 1 and 2.

    v_k = g(x_k) + (v_{k-1} - g(x_{k-1}))               both on the batch of step k; the inner optimizer gets v_k
    D_new: of H such steps from the anchor;  D_old: of the same batches from the anchor before
    u <- beta D_new + (1 - beta) (u + D_new - D_old)    means over the peers
    anchor <- anchor - u

The inner optimizer of the paper is SGD. Here it is AdamW, and both trajectories begin a round with the same moments.
"""

import torch
from common import clip


def fedglomo(replicas, steps, H=300, beta=0.5):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    before, u = anchor, torch.zeros_like(anchor)

    def train(r, x, optimizer, batches):
        v = last = None
        for batch in batches:
            g = r.gradient(batch, x)
            v = g if v is None else g + (v - r.gradient(batch, last))
            last = x.clone()
            optimizer.step(clip(v))

    for _ in range(steps // H):
        D_new, D_old = torch.zeros_like(anchor), torch.zeros_like(anchor)
        for r in replicas:
            batches = [next(r.batches) for _ in range(H)]
            old = before.clone()
            train(r, old, r.optimizer.twin(old), batches)
            train(r, r.x, r.optimizer, batches)
            D_new += (anchor - r.x) / len(replicas)
            D_old += (before - old) / len(replicas)
        u = beta * D_new + (1 - beta) * (u + D_new - D_old)
        before, anchor = anchor, anchor - u
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
