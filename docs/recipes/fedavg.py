"""FedAvg: McMahan et al. 2017, arXiv 1602.05629, algorithm 1.

    x_i <- anchor, then H inner steps                   each peer for itself
    anchor <- sum_i (n_i / n) x_i                       n_i: tokens that peer i learned from, n: of all

Written with D_i = anchor - x_i, which is what peers send: anchor <- anchor - sum_i (n_i / n) D_i.
"""


def fedavg(replicas, steps, H=300):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    for _ in range(steps // H):
        n = [-r.tokens for r in replicas]
        for i, r in enumerate(replicas):
            for _ in range(H):
                r.step()
            n[i] += r.tokens
        anchor = anchor - sum(n_i / sum(n) * (anchor - r.x) for n_i, r in zip(n, replicas, strict=True))
        for r in replicas:
            r.x.copy_(anchor)
    return anchor
