"""SelSync: Tyagi and Swany 2023, arXiv 2307.07950, algorithm 1. Average when gradients change.

    n_t: the norm of a peer's gradient, smoothed over w steps
    d = |n_t - n_{t-1}| / n_{t-1}
    x_i <- mean_j x_j                                   if any peer has d >= delta, and in the first w steps

The authors' code smooths over a window, and d once more; here n is an exponential average.
"""

from common import clip


def selsync(replicas, steps, delta=0.3, w=25):
    """Returns the mean of the parameters."""
    n = [None] * len(replicas)
    for t in range(steps):
        wanted = t < w
        for i, r in enumerate(replicas):
            g = r.gradient()
            r.update(clip(g))
            norm = float(g.norm())
            before = norm if n[i] is None else n[i]
            n[i] = before + 2 / (w + 1) * (norm - before)
            wanted = wanted or abs(n[i] - before) / before >= delta
        mean = sum(r.x for r in replicas) / len(replicas)
        if wanted:
            for r in replicas:
                r.x.copy_(mean)
    return mean
