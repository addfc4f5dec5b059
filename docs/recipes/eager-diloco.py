"""Eager updates: Kale et al. 2025, arXiv 2502.12996, algorithm 2. A whole round of delay, one's own share excepted.

    D_i(t) = anchor_i - x_i                             after H steps of AdamW
    D(t) = mean_i D_i(t)                                its exchange takes until t + H
    D~_i(t) = D(t - H) + (D_i(t) - D_i(t - H)) / R      the last known mean, with one's own share renewed
    m_i <- beta m_i + D~_i
    anchor_i <- anchor_i - eta (D~_i + beta m_i);  x_i <- anchor_i

What all peers share is the anchor that D alone moves: the result, and the place where a newcomer starts.
"""

import torch


def eager_diloco(replicas, steps, H=30, eta=0.7, beta=0.9):
    """Returns the shared anchor."""
    R, shared = len(replicas), replicas[0].x.clone()
    D = momentum = torch.zeros_like(shared)
    own, m, anchor = [D] * R, [D] * R, [shared] * R
    for _ in range(steps // H):
        for i, r in enumerate(replicas):
            for _ in range(H):
                r.step()
            D_i = anchor[i] - r.x
            eager = D + (D_i - own[i]) / R
            own[i] = D_i
            m[i] = beta * m[i] + eager
            anchor[i] = anchor[i] - eta * (eager + beta * m[i])
            r.x.copy_(anchor[i])
        D = sum(own) / R
        momentum = beta * momentum + D
        shared = shared - eta * (D + beta * momentum)
    return shared
