"""Dynamic backup workers: Xiong et al. 2021, arXiv 2102.06280, algorithm 1. A step's average is of the fastest alone.

    x_i <- an inner step                                each peer at its own speed
    x_i <- mean_j x_j                                   over the members of the round, those that came first
    of the k components which the rounds of a window have connected so far, a round with r rounds left in its window,
    itself included, waits for members of max(k - r + 1, min(2, k)): so every window connects all peers

In the paper each worker waits for some of its neighbours, with Metropolis weights; here a round is one group.
speed: steps per second of each replica. An exchange takes no time here.
"""

import heapq


def dybw(replicas, rounds, speed, window=4):
    """Returns the members of each of so many rounds."""
    R = len(replicas)
    ready = [(1 / speed[i], i) for i in range(R)]
    heapq.heapify(ready)
    members, waiting, component = [], [], list(range(R))
    while len(members) < rounds:
        left = window - len(members) % window
        if left == window:
            component = list(range(R))
        now, i = heapq.heappop(ready)
        replicas[i].step()
        waiting.append(i)
        k = len(set(component))
        enough = max(k - left + 1, min(2, k))
        if len(waiting) < 2 or len({component[j] for j in waiting}) < enough:
            continue
        mean = sum(replicas[j].x for j in sorted(waiting)) / len(waiting)
        joined = {component[j] for j in waiting}
        component = [min(joined) if c in joined else c for c in component]
        for j in waiting:
            replicas[j].x.copy_(mean)
            heapq.heappush(ready, (now + 1 / speed[j], j))
        members.append(tuple(sorted(waiting)))
        waiting = []
    return members
