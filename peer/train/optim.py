"""The inner optimizer: AdamW with decay on matrices only, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from peer.errors import UserError
from peer.protocol.manifest import InnerSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, inner: InnerSpec) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; biases and norms (fewer than two dimensions) do not decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    vectors = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": inner.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=inner.learning_rate, betas=inner.betas, eps=inner.eps
    )


def optimizer_tensors(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The whole state as `<parameter name>.<exp_avg | exp_avg_sq | step>`; the tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Replace the whole state by copies of `tensors`; what `optimizer_tensors` gave continues bit for bit.

    Raises:
        UserError: names or shapes that do not belong to these parameters. The optimizer is then unchanged.
    """
    parameters = dict(_named_parameters(optimizer))
    loaded: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition(".")
        expected = _expected_shape(parameters.get(name), field)
        if tensor.shape != expected:
            raise UserError(
                f"optimizer state {key!r} of shape {list(tensor.shape)}: this model has "
                + ("no such state" if expected is None else f"shape {list(expected)}"),
                "resume from a checkpoint of the same model",
            )
        # AdamW keeps its step count on the CPU.
        device = torch.device("cpu") if field == "step" else parameters[name].device
        loaded.setdefault(name, {})[field] = tensor.to(device, torch.float32, copy=True)
    for name, state in loaded.items():
        if len(state) != len(_MOMENTS) + 1:
            raise UserError(f"optimizer state of {name!r} has only {sorted(state)}", "resume from another checkpoint")
    optimizer.state.clear()
    for name, state in loaded.items():
        optimizer.state[parameters[name]] = state


def _expected_shape(parameter: Tensor | None, field: str) -> torch.Size | None:
    if parameter is None or field not in (*_MOMENTS, "step"):
        return None
    return torch.Size([]) if field == "step" else parameter.shape


def _named_parameters(optimizer: torch.optim.AdamW) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)
