"""Muon: momentum, orthogonalised, for matrices; AdamW for everything else.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; the scale of the step is that of Liu et al. 2025
(arXiv 2502.16982, section 2.2), so that one learning rate serves matrices and the rest alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the quintic that converges fastest from any singular value
ITERATIONS = 5
UPDATE_RMS = 0.2  # of an AdamW step (arXiv 2502.16982, equation 4)


def orthogonalise(matrices_brc: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """The nearest semi-orthogonal matrices, approximately: singular values end between about .7 and 1.2.

    Args:
        matrices_brc: fp32 [b, r, c], any scale.
        iterations: of Newton-Schulz.

    Returns:
        A new fp32 [b, r, c].
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrices_brc.mT if matrices_brc.shape[-2] > matrices_brc.shape[-1] else matrices_brc
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x.mT.contiguous() if matrices_brc.shape[-2] > matrices_brc.shape[-1] else x
    return result


@dataclass
class MuonMatrices:
    """Muon's state and step for equally shaped matrices.

    Attributes:
        weights: fp32 [r, c] each, changed in place.
        momentum: of the gradient.
        weight_decay: decoupled, as in AdamW.
    """

    weights: Sequence[Tensor]
    momentum: float
    weight_decay: float
    buffer_brc: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.buffer_brc = torch.zeros(len(self.weights), *self.weights[0].shape, device=self.weights[0].device)

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """m <- beta m + g; w <- (1 - lr wd) w - lr .2 sqrt(max(r, c)) orthogonalise(g + beta m)."""
        stacked = torch.stack(list(gradients))
        self.buffer_brc.mul_(self.momentum).add_(stacked)
        steps = orthogonalise(stacked.add_(self.buffer_brc, alpha=self.momentum))
        scale = lr * UPDATE_RMS * max(steps.shape[-2:]) ** 0.5
        for weight, step in zip(self.weights, steps, strict=True):
            weight.mul_(1.0 - lr * self.weight_decay).sub_(step, alpha=scale)
