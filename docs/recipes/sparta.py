"""SPARTA: Beton et al. 2025, openreview stFPf3gzq1, and its code. A few parameters of all peers, now and then.

    x_i <- an inner step                                H times
    x_i <- mean x on a mask, x_i elsewhere              the same mask of 5% for all, so that no position is sent

mask(t): the chosen coordinates of round t = 1, 2, ..., drawn from a seed that all peers know.
"""


def sparta(replicas, steps, mask, H=20):
    """Returns the mean of the parameters."""
    for t in range(1, steps // H + 1):
        for r in replicas:
            for _ in range(H):
                r.step()
        chosen = mask(t)
        mean = sum(r.x[chosen] for r in replicas) / len(replicas)
        for r in replicas:
            r.x[chosen] = mean
    return sum(r.x for r in replicas) / len(replicas)
