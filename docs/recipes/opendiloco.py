"""OpenDiLoCo: Jaghouar et al. 2024, arXiv 2407.07852. DiLoCo, whose vectors travel in 8 bits.

    D = C(mean_i C(anchor - x_i))                       C on the way to a reducer, and back to all
    C(v): blocks of 256 values; s = max |v| / 127, and each value becomes s round(v / s)
    m <- beta m + D
    anchor <- anchor - eta (D + beta m)

In the paper the all-reduce is in fp16; 8 bits are Atoll's choice.
"""

import torch


def opendiloco(replicas, steps, H=500, eta=0.7, beta=0.9):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)

    def C(v):
        scales = [(block.abs().max() / 127).clamp(min=2**-126) for block in v.split(256)]
        return torch.cat([s * (block / s).round() for s, block in zip(scales, v.split(256), strict=True)])

    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.step()
        D = C(sum(C(anchor - r.x) for r in replicas) / len(replicas))
        m = beta * m + D
        anchor = anchor - eta * (D + beta * m)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
