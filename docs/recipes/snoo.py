"""SNOO: Kallusky et al. 2025, arXiv 2510.15830. DiLoCo of one peer; with several, their mean takes its place.

    x <- anchor, then K steps of any optimizer
    s = anchor - x
    b <- mu b + s
    anchor <- anchor - eta (mu b + s)
"""

import torch


def snoo(replicas, steps, H=100, eta=0.8, mu=0.75):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    b = torch.zeros_like(anchor)
    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        s = sum(anchor - r.x for r in replicas) / len(replicas)
        b = mu * b + s
        anchor = anchor - eta * (mu * b + s)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
