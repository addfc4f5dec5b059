"""DeMo: Peng et al. 2024, arXiv 2411.19870, algorithm 1. Every step; momentum that stays where it is not needed.

    e_i <- beta e_i + lr g_i
    send C(e_i);  e_i <- e_i - C(e_i)
    x <- x - lr sign(mean_i C(e_i))                     the same on all peers; no other optimizer
    C: the k largest of the 2-D cosine coefficients of each 64 x 64 tile

The authors' code averages each coefficient over its senders, and does not clip g.
"""

import torch
from common import blocks, clip, cosines, inverse


def demo(replicas, steps, beta=0.999, k=32):
    """Returns the parameters that all hold."""
    shapes, lr = replicas[0].shapes, replicas[0].lr
    e = [torch.zeros_like(r.x) for r in replicas]

    def C(v):
        out = torch.zeros_like(v)
        for block, decoded in zip(blocks(v, shapes, 64), blocks(out, shapes, 64), strict=True):
            rows, columns = (cosines(side) for side in block.shape)
            coefficients = (rows @ block @ columns.T).flatten()
            kept = coefficients.abs().topk(min(k, len(coefficients))).indices
            sparse = torch.zeros_like(coefficients).scatter(0, kept, coefficients[kept]).view_as(block)
            decoded.copy_(inverse(sparse))
        return out

    for _ in range(steps):
        e = [beta * e_i + lr * clip(r.gradient()) for e_i, r in zip(e, replicas, strict=True)]
        sent = [C(e_i) for e_i in e]
        e = [e_i - s for e_i, s in zip(e, sent, strict=True)]
        for r in replicas:
            r.x.sub_(lr * torch.sign(sum(sent)))
    return replicas[0].x
