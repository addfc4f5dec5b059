"""SparseLoCo: Sarfi et al. 2025, arXiv 2508.15706, algorithm 1.

    D_i = anchor - x_i                                  after H steps of AdamW
    e_i <- beta e_i + D_i
    send C(e_i);  e_i <- e_i - C(e_i)
    anchor <- anchor - eta sum_i C(e_i) / R             to all from all: nothing is added up on the way
    C: the k largest of each 64 x 64 tile of a matrix, of every 4096 values of a vector, in 2 bits

The residual e takes the place of outer momentum.
"""

import torch
from common import blocks, int2


def sparseloco(replicas, steps, H=30, eta=1.0, beta=0.95, k=64):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    shapes = replicas[0].shapes
    e = [torch.zeros_like(anchor) for _ in replicas]

    def C(v):
        out = torch.zeros_like(v)
        for block, decoded in zip(blocks(v, shapes, 4096), blocks(out, shapes, 4096), strict=True):
            values, sparse = block.flatten(), torch.zeros(block.numel())
            kept = values.abs().topk(min(k, values.numel())).indices
            sparse[kept] = int2(values[kept])
            decoded.copy_(sparse.view_as(block))
        return out

    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        e = [beta * e_i + (anchor - r.x) for e_i, r in zip(e, replicas, strict=True)]
        sent = [C(e_i) for e_i in e]
        e = [e_i - s for e_i, s in zip(e, sent, strict=True)]
        anchor = anchor - eta * sum(sent) / len(replicas)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
