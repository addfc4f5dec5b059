"""MuLoCo: Thérien et al. 2025, arXiv 2505.23725. DiLoCo with Muon inside, and 2 bits a value both ways.

    D_i = anchor - x_i                                  after H steps of Muon
    e_i <- .9 e_i + .8 D_i;  send C(e_i);  e_i <- e_i - C(e_i)
    r <- .9 r + mean_i C(e_i);  send C(r) to all;  r <- r - C(r)
    m <- beta m + C(r)
    anchor <- anchor - eta (C(r) + beta m)
    C: blocks of 256 values, each value a sign and one of two magnitudes

What C loses is kept in e and r, and sent in later rounds. The feedback of r, on the way back, is Tang et al. 2019,
arXiv 1905.05957; the gain .8 is taken from the authors' code.
"""

import torch
from common import int2


def muloco(replicas, steps, H=30, eta=0.8, beta=0.9, decay=0.9, gain=0.8):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m, r = torch.zeros_like(anchor), torch.zeros_like(anchor)
    e = [torch.zeros_like(anchor) for _ in replicas]

    def C(v):
        return torch.cat([int2(block) for block in v.split(256)])

    for _ in range(steps // H):
        for replica in replicas:
            for _ in range(H):
                replica.step()
        e = [decay * e_i + gain * (anchor - replica.x) for e_i, replica in zip(e, replicas, strict=True)]
        sent = [C(e_i) for e_i in e]
        e = [e_i - s for e_i, s in zip(e, sent, strict=True)]
        r = decay * r + sum(sent) / len(replicas)
        D = C(r)
        r = r - D
        m = beta * m + D
        anchor = anchor - eta * (D + beta * m)
        for replica in replicas:
            replica.x.copy_(anchor)
    return anchor
