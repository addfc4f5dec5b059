"""Elastic averaging SGD, the synchronous form: Zhang et al. 2015, arXiv 1412.6651, section 3.

    d_i = a (x_i - c)                                   every tau inner steps
    x_i <- x_i - d_i
    c <- c + sum_i d_i                                  beta = R a, .9 in the paper

What the centre c wins is what the replicas give: c + sum_i x_i is kept.
"""


def easgd(replicas, steps, tau=16, beta=0.9):
    """Returns the centre."""
    c = replicas[0].x.clone()
    a = beta / len(replicas)
    for _ in range(steps // tau):
        for r in replicas:
            for _ in range(tau):
                r.step()
        d = [a * (r.x - c) for r in replicas]
        for r, d_i in zip(replicas, d, strict=True):
            r.x.sub_(d_i)
        c = c + sum(d)
    return c
