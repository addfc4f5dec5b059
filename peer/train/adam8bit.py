"""AdamW whose moments take one byte each, in blocks with a scale of their own.

After Dettmers et al. 2021, "8-bit optimizers via block-wise quantization" (arXiv 2110.02861); the levels are powers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.train.sharding import held, local

BLOCK = 256
SMALLEST = 4096  # parameters with fewer elements keep fp32 moments
SIGNED_LEVELS, SIGNED_POWER = 127, 2  # of the first moment; a power above 1 gives small values more levels
LEVELS, POWER = 255, 4  # of the second, which spans the square of that range
ROUND_UP = 1.0 - 1e-3


@dataclass(frozen=True)
class Quantized:
    """A tensor as codes of one byte, [blocks, BLOCK], and the largest magnitude of each block.

    Quantizing what `dequantize` gave yields the same codes, so that a checkpoint continues bit for bit.
    """

    codes: Tensor
    scales: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, x: Tensor, signed: bool) -> Quantized:
        """Of an fp32 tensor; if not signed, of values >= 0, which are rounded up: Adam divides by their root."""
        flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        scales = flat.abs().amax(1, keepdim=True)
        relative = flat.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)
        if signed:
            codes = relative.pow_(1 / SIGNED_POWER).mul_(SIGNED_LEVELS).round_().mul_(flat.sign()).to(torch.int8)
        else:
            codes = relative.pow_(1 / POWER).mul_(LEVELS).add_(ROUND_UP).floor_().clamp_max_(LEVELS).to(torch.uint8)
        return cls(codes, scales, x.shape)

    def dequantize(self) -> Tensor:
        """The tensor, fp32."""
        codes = self.codes.float()
        if self.codes.dtype == torch.int8:
            relative = codes.div_(SIGNED_LEVELS)
            values = relative * relative.abs()
        else:
            values = codes.div_(LEVELS).pow_(POWER)
        return values.mul_(self.scales).flatten()[: self.shape.numel()].view(self.shape)


class AdamW8bit(torch.optim.Optimizer):
    """The steps of `torch.optim.AdamW`, up to the rounding of moments; 2 bytes a parameter instead of 8.

    Where ranks share a parameter, each has the moments of its rows, in blocks of their own.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """See `torch.optim.AdamW.step`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's exp_avg, exp_avg_sq and step of a parameter, in fp32; empty before its first step."""
        state = self.state.get(parameter, {})
        if not state:
            return {}
        first, second = (held(_dequantized(state[key]), parameter) for key in ("exp_avg", "exp_avg_sq"))
        return {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(state["step"]))}

    def keep(self, parameter: Tensor, moments: dict[str, Tensor]) -> None:
        """Replace them."""
        small = parameter.numel() < SMALLEST
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            own = local(moments[key])
            self.state[parameter][key] = own if small else Quantized.of(own, signed)
        self.state[parameter]["step"] = int(moments["step"])

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        (beta1, beta2), lr, gradient, own = group["betas"], group["lr"], local(parameter.grad), local(parameter)
        now = self.moments(parameter)
        first, second = (local(now[key]) if now else torch.zeros_like(own) for key in ("exp_avg", "exp_avg_sq"))
        step = int(now["step"]) + 1 if now else 1
        first.lerp_(gradient, 1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        divisor = second.div(1.0 - beta2**step).sqrt_().add_(group["eps"])
        own.mul_(1.0 - lr * group["weight_decay"]).addcdiv_(first, divisor, value=-lr / (1.0 - beta1**step))
        self.keep(parameter, {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(step))})


def _dequantized(moment: Tensor | Quantized) -> Tensor:
    return moment.dequantize() if isinstance(moment, Quantized) else moment
