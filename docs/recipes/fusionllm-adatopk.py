"""AdaTopK of FusionLLM: Tang et al. 2024, arXiv 2410.12707, section 5. Every step; sparser on slower uplinks.

    e_i <- e_i + clip(g_i)
    send the k_i largest of every 4096 values of e_i;  they become 0 in e_i
    k_i / 4096 = c uplink_i, at most 1, with mean ratio: all uplinks then finish together
    g = mean_i of what was sent;  x <- AdamW(x, g)      the same on all peers

The paper compresses what the stages of a pipeline send each other; here its rule decides about gradients.
"""

import torch
from common import clip


def fusionllm_adatopk(replicas, steps, uplink, ratio=0.01):
    """uplink: bytes per second of each replica. Returns the parameters that all hold."""
    e = [torch.zeros_like(r.x) for r in replicas]
    low, high = 0.0, 1.0 / min(uplink)
    for _ in range(200):
        c = (low + high) / 2
        mean = sum(min(1.0, c * up) for up in uplink) / len(uplink)
        low, high = (c, high) if mean < ratio else (low, c)
    k = [max(1, round(4096 * min(1.0, c * up))) for up in uplink]
    for _ in range(steps):
        g = torch.zeros_like(e[0])
        for e_i, k_i, r in zip(e, k, replicas, strict=True):
            e_i += clip(r.gradient())
            for block, out in zip(e_i.split(4096), g.split(4096), strict=True):
                kept = block.abs().topk(min(k_i, len(block))).indices
                out[kept] += block[kept] / len(replicas)
                block[kept] = 0.0
        for r in replicas:
            r.update(g)
    return replicas[0].x
