"""PAPA: Jolicoeur-Martineau et al. 2023, arXiv 2304.03094, algorithm 1.

    mean = mean_i x_i                                   every T inner steps
    x_i <- alpha x_i + (1 - alpha) mean

The replicas stay apart, and are drawn together slowly; their mean is the result, which this step does not move.
"""


def papa(replicas, steps, T=10, alpha=0.99):
    """Returns the mean."""
    for _ in range(steps // T):
        for r in replicas:
            for _ in range(T):
                r.step()
        mean = sum(r.x for r in replicas) / len(replicas)
        for r in replicas:
            r.x.copy_(alpha * r.x + (1 - alpha) * mean)
    return mean
