"""PABA: Wen, Bennis and Huang 2020, arXiv 2003.04544. FedAvg, whose work is divided such that all end together.

    s_i: share of the vector that peer i reduces: it sends and receives P (1 + (R - 2) s_i) bytes at b_i a second;
         the s_i are those with the shortest slowest exchange
    h_i = v_i (T - exchange_i) steps of peer i, which makes v_i a second; T such that they add up to R H
    anchor <- sum_i (n_i / n) x_i                       n_i: tokens that peer i learned from

The paper divides a server's bandwidth among groups that train different blocks; here each trains the whole model.
"""

import math


def paba(replicas, rounds, speed, rate, num_bytes, H=30):
    """speed: v_i, steps per second; rate: b_i, bytes per second; num_bytes: P. Returns the anchor after each round."""
    R = len(replicas)

    def fill(slopes, offsets, total):
        """max(0, slope (T - offset)), with the T for which they add up, by bisection."""
        low, high = 0.0, max(offsets) + total / min(slopes)
        for _ in range(200):
            T = (low + high) / 2
            filled = [max(0.0, slope * (T - offset)) for slope, offset in zip(slopes, offsets, strict=True)]
            low, high = (T, high) if sum(filled) < total else (low, T)
        return filled

    s = [1 / R] * R
    if R > 2:
        s = fill([b / (num_bytes * (R - 2)) for b in rate], [num_bytes / b for b in rate], 1.0)
    exchange = [num_bytes * (1 + (R - 2) * s_i) / b for s_i, b in zip(s, rate, strict=True)]
    quota = fill(speed, exchange, R * H)
    h = [math.floor(q) for q in quota]
    for i in sorted(range(R), key=lambda i: h[i] - quota[i])[: R * H - sum(h)]:
        h[i] += 1                                       # whole steps: the largest remainders get the rest
    h = [max(1, h_i) for h_i in h]
    anchors = [replicas[0].x.clone()]
    for _ in range(rounds):
        for r, h_i in zip(replicas, h, strict=True):
            for _ in range(h_i):
                r.step()
        D = sum(h_i / sum(h) * (anchors[-1] - r.x) for h_i, r in zip(h, replicas, strict=True))
        anchors.append(anchors[-1] - D)
        for r in replicas:
            r.x.copy_(anchors[-1])
    return anchors[1:]
