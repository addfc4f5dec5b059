"""Lagoon, Atoll's default: Muon inside and 2 bits both ways, as in MuLoCo, with longer rounds and an average.

    D_i = anchor - x_i                                  after H steps of Muon
    e_i <- e_i + D_i;  send C(e_i);  e_i <- e_i - C(e_i)
    r <- r + mean_i C(e_i);  send C(r) to all;  r <- r - C(r)
    m <- beta m + C(r)
    anchor <- anchor - eta (C(r) + beta m)
    a <- c a + (1 - c) anchor                           after k rounds the result is a / (1 - c^k)
    C: blocks of 256 values, each value a sign and one of two magnitudes

Muon and 2 bits: Thérien et al. 2025, arXiv 2505.23725. Feedback on both legs: Tang et al. 2019, arXiv 1905.05957. The
average: Kaddour 2022, arXiv 2209.14981. The numbers were searched for by this project.
"""

import torch
from common import int2


def lagoon(replicas, steps, H=68, eta=0.9, beta=0.7, c=0.75):
    """Returns the average of the anchors."""
    anchor = replicas[0].x.clone()
    m, r, a = torch.zeros_like(anchor), torch.zeros_like(anchor), torch.zeros_like(anchor)
    e = [torch.zeros_like(anchor) for _ in replicas]

    def C(v):
        return torch.cat([int2(block) for block in v.split(256)])

    for _ in range(steps // H):
        for replica in replicas:
            for _ in range(H):
                replica.step()
        e = [e_i + (anchor - replica.x) for e_i, replica in zip(e, replicas, strict=True)]
        sent = [C(e_i) for e_i in e]
        e = [e_i - s for e_i, s in zip(e, sent, strict=True)]
        r = r + sum(sent) / len(replicas)
        D = C(r)
        r = r - D
        m = beta * m + D
        anchor = anchor - eta * (D + beta * m)
        a = c * a + (1 - c) * anchor
        for replica in replicas:
            replica.x.copy_(anchor)
    return a / (1 - c ** (steps // H))
