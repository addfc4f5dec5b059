"""A2CiD2: Nabli et al. 2023, arXiv 2306.08289, algorithm 1. Gossip on a sparse graph with a second iterate.

    gradient step:   the same on x_i and x~_i
    until the event: x, x~ <- (1+e)/2 x + (1-e)/2 x~, (1-e)/2 x + (1+e)/2 x~       e = exp(-2 eta dt), here dt = 1
    event with j:    x~_i <- x~_i - a~ (x_i - x_j);  x_i <- (x_i + x_j) / 2         only x is sent
    eta = 1 / (2 sqrt(chi1 chi2)),  a~ = sqrt(chi1 / chi2) / 2
    L: the Laplacian of the graph, each edge as often as it has an event in a unit of time
    chi1 = 1 / the smallest positive eigenvalue of L;  chi2 = half of the largest resistance of an edge

pairs(t): who meets at step t = 1, 2, ...: a random matching of the ring. The paper's clocks are random.
"""

import math

import torch


def a2cid2(replicas, steps, pairs):
    """Returns the mean of the parameters."""
    R = len(replicas)
    edges = {tuple(sorted((i, (i + 1) % R))) for i in range(R)}
    rows = torch.stack([torch.eye(R, dtype=torch.float64)[i] - torch.eye(R)[j] for i, j in edges])
    L = R / (2 * len(edges)) * rows.T @ rows
    chi1 = 1 / torch.linalg.eigvalsh(L)[1]
    chi2 = (rows @ torch.linalg.pinv(L, hermitian=True) @ rows.T).diagonal().max() / 2
    eta, a = float(1 / (2 * (chi1 * chi2).sqrt())), float((chi1 / chi2).sqrt() / 2)
    e = math.exp(-2 * eta)
    tilde = [r.x.clone() for r in replicas]
    for t in range(1, steps + 1):
        for i, r in enumerate(replicas):
            before = r.x.clone()
            r.step()
            tilde[i] += r.x - before
            x = r.x.clone()
            r.x.copy_((1 + e) / 2 * x + (1 - e) / 2 * tilde[i])
            tilde[i] = (1 - e) / 2 * x + (1 + e) / 2 * tilde[i]
        for i, j in (pair for pair in pairs(t) if len(pair) == 2):
            difference, mean = replicas[i].x - replicas[j].x, (replicas[i].x + replicas[j].x) / 2
            tilde[i] -= a * difference
            tilde[j] += a * difference
            replicas[i].x.copy_(mean)
            replicas[j].x.copy_(mean)
    return sum(r.x for r in replicas) / R
