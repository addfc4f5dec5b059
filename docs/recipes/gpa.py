"""GPA, generalised primal averaging: Defazio et al. 2025, arXiv 2512.17131, on all peers' mean gradient.

    g = mean_i gradient_i(y)                            y = mu_y x + (1 - mu_y) z
    z <- AdamW(z, g)
    x <- mu_x x + (1 - mu_x) z                          the result

DiLoCo of one peer and 32 steps, at every step. It is the gradient of one large batch that is clipped.
"""

from common import clip


def gpa(replicas, steps, mu_x=0.9967, mu_y=0.7):
    """Returns x; all peers hold y."""
    z = replicas[0].x.clone()
    x = z.clone()
    optimizer = type(replicas[0].optimizer)(z, replicas[0].shapes, replicas[0].lr)
    for _ in range(steps):
        optimizer.step(clip(sum(r.gradient() for r in replicas) / len(replicas)))
        x = mu_x * x + (1 - mu_x) * z
        for r in replicas:
            r.x.copy_(mu_y * x + (1 - mu_y) * z)
    return x
