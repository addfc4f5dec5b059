"""SAPS-PSGD: Tang et al. 2020, arXiv 2002.09692, algorithm 2. One partner, and 1% of the coordinates, at every step.

    x_i <- an inner step
    x_i <- x_i + mask (x_j - x_i) / 2                   the same mask on both sides, so that no position is sent

pairs(t): a random maximum matching of the links at least as fast as the median; toward the end of every ten rounds
other links take part, such that the pairs of the ten connect all peers.
mask(t): the chosen coordinates of step t = 1, 2, ..., drawn from a seed that all peers know.
"""


def saps(replicas, steps, pairs, mask):
    """Returns the mean of the parameters."""
    for t in range(1, steps + 1):
        for r in replicas:
            r.step()
        chosen = mask(t)
        for i, j in (pair for pair in pairs(t) if len(pair) == 2):
            mean = (replicas[i].x[chosen] + replicas[j].x[chosen]) / 2
            replicas[i].x[chosen] = mean
            replicas[j].x[chosen] = mean
    return sum(r.x for r in replicas) / len(replicas)
