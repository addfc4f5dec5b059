"""FedProx: Li et al. 2020, arXiv 1812.06127, algorithm 2.

    min_x F_i(x) + mu/2 |x - anchor|^2                  what each peer works on in its H inner steps
    g <- g + mu (x_i - anchor)                          so this is its gradient
    anchor <- mean_i x_i

The inner optimizer of the paper is SGD. Here it is AdamW, and g is clipped before the pull is added.
"""

from common import clip


def fedprox(replicas, steps, H=300, mu=0.01):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    for _ in range(steps // H):
        for r in replicas:
            for _ in range(H):
                r.update(clip(r.gradient()) + mu * (r.x - anchor))
        anchor = sum(r.x for r in replicas) / len(replicas)
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
