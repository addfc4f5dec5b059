"""Covenant-72B's SparseLoCo: Lidin et al. 2026, arXiv 2603.08163, and its code.

    D_i = anchor - x_i                                  after H steps of AdamW
    e_i <- beta e_i + D_i
    send s_i = C(e_i);  e_i <- e_i - s_i
    anchor <- anchor - eta mean_i s_i min(1, median |s| / |s_i|)
    eta: 1 up to 15% of the rounds, then in a straight line to .4 at half of them
    C: the k largest of each 64 x 64 tile of a matrix, of every 4096 values of a vector, in 2 bits

The run's eta fell in six steps, by hand; its norms were those of each tensor.
"""

from statistics import median

import torch
from common import blocks, int2


def covenant(replicas, steps, H=30, first=1.0, last=0.4, beta=0.95, k=64):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    shapes, rounds = replicas[0].shapes, steps // H
    e = [torch.zeros_like(anchor) for _ in replicas]

    def C(v):
        out = torch.zeros_like(v)
        for block, decoded in zip(blocks(v, shapes, 4096), blocks(out, shapes, 4096), strict=True):
            values, sparse = block.flatten(), torch.zeros(block.numel())
            kept = values.abs().topk(min(k, values.numel())).indices
            sparse[kept] = int2(values[kept])
            decoded.copy_(sparse.view_as(block))
        return out

    for t in range(1, rounds + 1):
        for r in replicas:
            for _ in range(H):
                r.step()
        e = [beta * e_i + (anchor - r.x) for e_i, r in zip(e, replicas, strict=True)]
        sent = [C(e_i) for e_i in e]
        e = [e_i - s for e_i, s in zip(e, sent, strict=True)]
        norms = [float(s.norm()) for s in sent]
        clipped = [s * min(1.0, median(norms) / norm) for s, norm in zip(sent, norms, strict=True)]
        eta = first + (last - first) * min(1.0, max(0.0, (t / rounds - 0.15) / 0.35))
        anchor = anchor - eta * sum(clipped) / len(replicas)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
