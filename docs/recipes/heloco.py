"""HeLoCo: Al Asif et al. 2026, arXiv 2606.00271, by two programs after it. What opposes the momentum is turned.

    x_i <- anchor, then H steps of AdamW                each peer at its own speed; D_i = its anchor - x_i
    a round begins with K contributions; D = sum_i w_i D_i / sum_i w_i,  w_i = tokens_i (1 + s_i)^-1/2
    per tensor, with c the cosine of D and m, trust = |D| / (|D| + 3 |m|):
      c < 0:   D <- D - min(-c trust / 2, 1/2) c |D| m / |m|
      c < .2:  D <- |D| u / |u|,  u = (1 - l) D / |D| + l m / |m|,  l = min((1 - c) trust, 1)
    m <- beta m + (1 - beta) D;  theta <- theta - eta (D + beta m);  anchor <- theta - eta beta m

The paper turns each D_i before it is added. Here all peers keep pace: the weights are equal, and theta is the result.
"""

import torch
from common import tensors


def heloco(replicas, steps, H=30, eta=0.7, beta=0.9):
    """Returns theta."""
    theta = replicas[0].x.clone()
    anchor, m = theta.clone(), torch.zeros_like(theta)
    shapes = replicas[0].shapes

    def turned(d, m):
        c = float((d * m).sum() / (d.norm() * m.norm() + 1e-30))
        if c >= 0.2 or not m.any():
            return d
        trust = float(d.norm() / (d.norm() + 3 * m.norm()))
        if c < 0:
            return d - min(-c * trust / 2, 0.5) * c * d.norm() * m / m.norm()
        part = min((1 - c) * trust, 1)
        u = (1 - part) * d / d.norm() + part * m / m.norm()
        return d.norm() * u / u.norm()

    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        for d, own in zip(tensors(D, shapes), tensors(m, shapes), strict=True):
            d.copy_(turned(d, own))
        m = beta * m + (1 - beta) * D
        theta = theta - eta * (D + beta * m)
        anchor = theta - eta * beta * m
        for r in replicas:
            r.x.copy_(anchor)
    return theta
