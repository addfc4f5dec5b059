"""Pier: Fan and Zhang 2025, arXiv 2511.17849. DiLoCo whose momentum gathers first, and whose rate has a course.

    D = mean_i (anchor - x_i)                           after H steps of AdamW
    m <- mu m + D
    anchor <- anchor - D                                up to a tenth of the rounds, while mu = beta
    anchor <- anchor - lr (D + mu m)                    after that

mu is .99 up to 15% of the rounds, .95 up to 20%, then beta. lr grows from 0 to eta between 10% and 20%, and is `last`
after 80%. The authors average gradients at every step in the first tenth; here its rounds are as long as the others.
"""

import torch


def pier(replicas, steps, H=50, eta=1.1, last=0.9, beta=0.9):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)
    rounds = steps // H
    for k in range(1, rounds + 1):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = sum(anchor - r.x for r in replicas) / len(replicas)
        over = k / rounds
        mu = 0.99 if 0.1 < over <= 0.15 else 0.95 if 0.15 < over <= 0.2 else beta
        lr = last if over > 0.8 else eta * min(1, (over - 0.1) / 0.1)
        m = mu * m + D
        anchor = anchor - (D if over <= 0.1 else lr * (D + mu * m))
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
