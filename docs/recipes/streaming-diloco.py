"""Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512, algorithm 2.

    fragment p: every F-th block of the model from the p-th on; parameters before the blocks belong to the
    first, those after them to the last
    at steps t with t mod H = p H // F, of fragment p alone:
        D = C(mean_i C(anchor - x_i))
        m <- beta m + D
        anchor <- anchor - eta (D + beta m)
    tau steps later:  x_i <- alpha x_i + (1 - alpha) anchor
    C: blocks of 128 values in 4 bits, E3M0: a sign and 2^-6 ... 2^0, or 0, times the largest magnitude of the block

In the paper only contributions are in 4 bits, and their mean in fp32. alpha = 1 is no communication.

fragments: for each p the indices of its elements in the flat vector.
"""

import torch


def streaming_diloco(replicas, steps, fragments, H=100, tau=1, alpha=0.5, eta=0.4, beta=0.9):
    """Returns the anchor."""
    anchor = replicas[0].x.clone()
    m = torch.zeros_like(anchor)
    due = {p * H // len(fragments): own for p, own in enumerate(fragments)}
    arriving = {}

    def C(v):
        out = []
        for block in v.split(128):
            scale = block.abs().max().clamp(min=2.0**-120).bfloat16().float()
            mantissa, exponent = torch.frexp((block / scale).bfloat16().float().abs())  # mantissa 2^exponent, [.5, 1)
            power = exponent - 1 + (mantissa >= 0.75)
            size = torch.where((mantissa > 0) & (power >= -6), 2.0**power, 0.0)
            out.append(scale * size * torch.sign(block))
        return torch.cat(out)

    for t in range(1, steps + 1):
        for r in replicas:
            r.step()
        if (own := arriving.pop(t, None)) is not None:
            for r in replicas:
                r.x[own] = alpha * r.x[own] + (1 - alpha) * anchor[own]
        if (own := due.get(t % H)) is not None:
            D = C(sum(C(anchor[own] - r.x[own]) for r in replicas) / len(replicas))
            m[own] = beta * m[own] + D
            anchor[own] = anchor[own] - eta * (D + beta * m[own])
            arriving[t + tau] = own
    return anchor
