"""DisTrO, as Nous Research's Psyche has it, after DeMo (Peng et al. 2024, arXiv 2411.19870): signs, one step late.

    e_i <- beta e_i + lr g_i
    send C(e_i);  e_i <- e_i - C(e_i)
    x <- (1 - lr wd) x - lr sign(mean_i C(e_i))         with what was sent at the step before
    C: the k largest of the 2-D cosine coefficients of each 64 x 64 tile, each as a sign times their mean magnitude

Psyche sends bare signs, and computes gradients at x - lr sign(e_i).
"""

import torch
from common import blocks, clip, cosines, inverse


def distro(replicas, steps, beta=0.995, k=4, wd=0.1):
    """Returns the parameters that all hold."""
    shapes, lr, late = replicas[0].shapes, replicas[0].lr, None
    e = [torch.zeros_like(r.x) for r in replicas]

    def C(v):
        out = torch.zeros_like(v)
        for block, decoded in zip(blocks(v, shapes, 64), blocks(out, shapes, 64), strict=True):
            rows, columns = (cosines(side) for side in block.shape)
            coefficients = (rows @ block @ columns.T).flatten()
            kept = coefficients.abs().topk(min(k, len(coefficients))).indices
            magnitude = coefficients[kept].abs().mean().bfloat16().float()
            signs = torch.zeros_like(coefficients).scatter(0, kept, torch.sign(coefficients[kept])).view_as(block)
            decoded.copy_(inverse(magnitude * signs))
        return out

    for _ in range(steps):
        e = [beta * e_i + lr * clip(r.gradient()) for e_i, r in zip(e, replicas, strict=True)]
        sent = [C(e_i) for e_i in e]
        e = [e_i - s for e_i, s in zip(e, sent, strict=True)]
        for r in replicas:
            if late is not None:
                r.x.copy_((1 - lr * wd) * r.x - lr * torch.sign(late))
        late = sum(sent)
    return replicas[0].x
