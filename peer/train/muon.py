"""Muon: momentum, orthogonalised, for matrices; AdamW for everything else.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; the scale of the step is that of Liu et al. 2025
(arXiv 2502.16982, section 2.2), so that one learning rate serves matrices and the rest alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from peer.outer.optim.every_step import ITERATIONS, NEWTON_SCHULZ, UPDATE_RMS
from peer.train.ranks import whole
from peer.train.sharding import held, local, own_rows


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
        weights: fp32 [r, c] each, changed in place. Where ranks share them, each rank keeps the momentum of its rows;
            all gather a matrix at a time, orthogonalise it, and change their own rows.
        weight_decay: decoupled, as in AdamW.
        buffer_brc: momentum, of the rows that this rank holds.
    """

    weights: Sequence[Tensor]
    momentum: float
    weight_decay: float
    buffer_brc: Tensor = field(init=False)

    def __post_init__(self) -> None:
        first = local(self.weights[0])
        self.buffer_brc = torch.zeros(len(self.weights), *first.shape, device=first.device)

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """m <- beta m + g; w <- (1 - lr wd) w - lr .2 sqrt(max(r, c)) orthogonalise(g + beta m)."""
        stacked = torch.stack([local(gradient) for gradient in gradients])
        self.buffer_brc.mul_(self.momentum).add_(stacked)
        steps = self._orthogonal(stacked.add_(self.buffer_brc, alpha=self.momentum))
        scale = lr * UPDATE_RMS * max(self.weights[0].shape) ** 0.5
        if isinstance(steps, Tensor):  # a few launches for all matrices: a device may be waiting for each
            torch._foreach_mul_(list(self.weights), 1.0 - lr * self.weight_decay)
            torch._foreach_sub_(list(self.weights), list(steps), alpha=scale)
            return
        for weight, step in zip(self.weights, steps, strict=True):
            local(weight).mul_(1.0 - lr * self.weight_decay).sub_(step, alpha=scale)

    def _orthogonal(self, own_brc: Tensor) -> Tensor | Iterable[Tensor]:
        """The rows of this rank of each orthogonalised matrix, one after the other where ranks share them."""
        if not isinstance(self.weights[0], DTensor):
            return orthogonalise(own_brc)
        pairs = zip(own_brc, self.weights, strict=True)
        return (own_rows(orthogonalise(whole(held(own, weight))[None])[0], weight) for own, weight in pairs)


class MuonAdamW:
    """Muon on hidden matrices and AdamW on the rest, with the interface that a training step needs of an optimizer.

    Args:
        adamw: over embeddings, heads and vectors.
        matrices: (name, parameter) of the hidden matrices.
        lr, lr_ratio: Muon's rate is `lr * lr_ratio`.
    """

    def __init__(
        self, adamw: torch.optim.AdamW, matrices: Sequence[tuple[str, Tensor]], *, lr: float, lr_ratio: float,
        momentum: float, weight_decay: float,
    ) -> None:
        self.adamw, self._lr_ratio = adamw, lr_ratio
        self._group: dict[str, Any] = {
            "params": [parameter for _, parameter in matrices],
            "param_names": [name for name, _ in matrices],
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        self.param_groups = [*adamw.param_groups, self._group]
        self._stacks = []
        for shape in sorted({tuple(parameter.shape) for _, parameter in matrices}):
            members = [parameter for _, parameter in matrices if tuple(parameter.shape) == shape]
            stack = MuonMatrices([member.detach() for member in members], momentum, weight_decay)
            self._stacks.append((members, stack))

    @property
    def momentum(self) -> dict[Tensor, Tensor]:
        """Muon's buffer of each matrix, as a view."""
        return {
            member: held(buffer, member)
            for members, stack in self._stacks for member, buffer in zip(members, stack.buffer_brc, strict=True)
        }  # fmt: skip

    def step(self) -> None:
        """One step of both along the parameters' gradients."""
        self.adamw.step()
        for members, stack in self._stacks:
            gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in members]
            stack.step(gradients, self._group["lr"] * self._lr_ratio)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.adamw.zero_grad(set_to_none=set_to_none)
        for members, _ in self._stacks:
            for member in members:
                if set_to_none:
                    member.grad = None
                elif member.grad is not None:
                    member.grad.zero_()
