"""Asynchronous DiLoCo: Liu et al. 2024, arXiv 2401.09135; the quorum: Douillard et al. 2026, arXiv 2604.21428.

    x_i <- the newest anchor, then H steps of AdamW     each peer at its own speed; D_i = its anchor - x_i
    a round begins with K contributions, here half of the peers
    w_i = tokens_i (1 + s_i)^-1/2                       s_i: rounds since the anchor that peer i started from
    D = sum_i w_i D_i / sum_i w_i
    m <- beta m + D
    anchor <- anchor - eta (D + beta m)                 eta a tenth of DiLoCo's

speed: steps per second of each replica. An exchange takes no time here.
"""

import heapq
import math

import torch


def async_diloco(replicas, rounds, speed, H=30, fraction=0.5, eta=0.07, beta=0.9):
    """Returns the anchor after each of so many rounds."""
    anchors = [replicas[0].x.clone()]
    m = torch.zeros_like(anchors[0])
    started = [0] * len(replicas)
    ready = [(H / speed[i], i) for i in range(len(replicas))]
    heapq.heapify(ready)
    waiting = []
    while len(anchors) <= rounds:
        now, i = heapq.heappop(ready)
        for _ in range(H):
            replicas[i].step()
        waiting.append(i)
        if len(waiting) < math.ceil(fraction * len(replicas)):
            continue
        stale = [len(anchors) - 1 - started[j] for j in waiting]
        w = [H / math.sqrt(1 + s) for s in stale]
        D = sum(w_j / sum(w) * (anchors[started[j]] - replicas[j].x) for w_j, j in zip(w, waiting, strict=True))
        m = beta * m + D
        anchors.append(anchors[-1] - eta * (D + beta * m))
        for j in waiting:
            replicas[j].x.copy_(anchors[-1])
            started[j] = len(anchors) - 1
            heapq.heappush(ready, (now + H / speed[j], j))
        waiting = []
    return anchors[1:]
