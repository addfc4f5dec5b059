"""NoLoCo: Kolehmainen et al. 2025, arXiv 2506.10911, section 3. Random pairs; every peer has an anchor of its own.

    D_i = phi_i - x_i                                   after H inner steps; phi_i is the anchor of peer i
    m_i <- alpha m_i + mean D + (phi_i - mean phi)      means over the pair of peer i in this round
    phi_i <- phi_i - lr m_i;  x_i <- phi_i

pairs(t): the pairs of round t = 1, 2, ..., drawn from a seed that all peers know.
"""

import torch


def noloco(replicas, steps, pairs, H=50, lr=0.7, alpha=0.5):
    """Returns the mean of the anchors, which no peer holds."""
    phi = [r.x.clone() for r in replicas]
    m = [torch.zeros_like(anchor) for anchor in phi]
    for t in range(1, steps // H + 1):
        for r in replicas:
            for _ in range(H):
                r.step()
        for pair in pairs(t):
            D = sum(phi[i] - replicas[i].x for i in pair) / len(pair)
            centre = sum(phi[i] for i in pair) / len(pair)
            for i in pair:
                m[i] = alpha * m[i] + D + (phi[i] - centre)
                phi[i] = phi[i] - lr * m[i]
                replicas[i].x.copy_(phi[i])
    return sum(phi) / len(phi)
