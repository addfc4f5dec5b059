"""Vectors to encode: light tails, heavy tails, layers of very different scale; and how far decoding may be off."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Make = Callable[[int], Tensor]


def gaussian(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def student_t3(n: int) -> Tensor:
    chi_square = torch.stack([gaussian(n + k)[:n] ** 2 for k in (1, 2, 3)]).sum(dim=0)
    return gaussian(n) / (chi_square / 3.0).sqrt()


def mixed_scales(n: int) -> Tensor:
    return gaussian(n) * torch.pow(10.0, torch.linspace(-38.0, 37.0, n))


def zeros(n: int) -> Tensor:
    return torch.zeros(n)


def mostly_zeros(n: int) -> Tensor:
    return torch.where(torch.arange(n) % 97 == 0, gaussian(n), torch.zeros(n))


def constant(n: int) -> Tensor:
    return torch.full((n,), -0.37)


MAKERS: tuple[Make, ...] = (gaussian, student_t3, mixed_scales, zeros, mostly_zeros, constant)


def half_bound(x: Tensor, m: Tensor) -> Tensor:  # noqa: ARG001
    return torch.where(x.abs() > 65504, x.abs() - 65504, 2.0**-11 * x.abs() + 2.0**-25)


# (x of a block, its largest magnitude m) -> the largest error of each value, as the docstrings state it
BOUNDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fp32": lambda x, m: torch.zeros_like(x),  # noqa: ARG005
    "fp16": half_bound,
    "bf16": lambda x, m: 2.0**-8 * x.abs() + 2.0**-134,  # noqa: ARG005
    "int8": lambda x, m: ((1 + 2.0**-7) * m / 254).clamp(min=2.0**-127).expand_as(x),
    "int4": lambda x, m: ((1 + 2.0**-7) * m / 14).clamp(min=2.0**-127).expand_as(x),
    "fp4": lambda x, m: torch.maximum(0.34 * x.abs(), (0.0118 * m).clamp(min=2.0**-126).expand_as(x)),
    "int2": lambda x, m: ((1 + 2.0**-8) * m + 2.0**-126).expand_as(x),
    "sign": lambda x, m: ((1 + 2.0**-8) * m + 2.0**-126).expand_as(x),
}
