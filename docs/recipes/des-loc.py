"""DES-LOC: Iacob et al. 2025, arXiv 2505.22549. Peers average their optimizers' moments, too, but less often.

    x_i <- H steps of AdamW                             with moments u_i, v_i of its own
    x_i <- mean x                                       every round
    u_i <- mean u                                       every Ku rounds
    v_i <- mean v                                       every Kv rounds: it changes the slowest
"""

import torch


def des_loc(replicas, steps, H=256, Ku=3, Kv=6):
    """Returns the parameters that all hold."""
    states = [r.optimizer.torch.state for r in replicas]
    for t in range(1, steps // H + 1):
        for r in replicas:
            for _ in range(H):
                r.step()
        mean = sum(r.x for r in replicas) / len(replicas)
        for r in replicas:
            r.x.copy_(mean)
        for moment, every in (("exp_avg", Ku), ("exp_avg_sq", Kv)):
            if t % every == 0:
                for own in zip(*(state.values() for state in states), strict=True):
                    mean = torch.stack([one[moment] for one in own]).mean(0)
                    for one in own:
                        one[moment].copy_(mean)
    return replicas[0].x
