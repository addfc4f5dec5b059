"""PALSGD: Naganuma et al. 2025, arXiv 2504.18454, and its code. DiLoCo with pulls to the anchor at random steps.

    x_i <- an inner step of rate lr                     H times
    after each, as long as a draw falls below p: x_i <- x_i - (1 - p) lr (nu / p) (x_i - anchor)
    D = mean_i (anchor - x_i)
    m <- beta m + D
    anchor <- anchor - eta (D + beta m)

The paper counts a pull as a step, and multiplies the rate of the others by 1 / (1 - p): lr here is their rate. nu is
its eta. Workers draw alike, as in the code.
"""

import random

import torch


def palsgd(replicas, steps, H=100, p=0.2, nu=0.5, eta=0.25, beta=0.9):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)
    draws = random.Random(0)
    for _ in range(steps // H):
        for _ in range(H):
            for r in replicas:
                r.step()
            while draws.random() < p:
                for r in replicas:
                    r.x.sub_((1 - p) * r.lr * nu / p * (r.x - anchor))
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        m = beta * m + D
        anchor = anchor - eta * (D + beta * m)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
