"""The inner optimizer, with decay on matrices only, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from peer.errors import UserError
from peer.outer.optim.every_step import is_hidden_matrix
from peer.protocol.manifest import InnerSpec
from peer.train.adam8bit import AdamW8bit
from peer.train.gradient import KeptGradient
from peer.train.muon import MuonAdamW
from peer.train.sharding import as_parameter, local

_FIELDS = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "muon": ("momentum_buffer",), "sgd": ()}
FUSED_DEVICES = ("cuda", "mps")
Optimizer = torch.optim.AdamW | torch.optim.SGD | AdamW8bit | MuonAdamW | KeptGradient


def build_optimizer(model: nn.Module, inner: InnerSpec, eight_bit: bool = False) -> Optimizer:
    """The inner optimizer over the trainable parameters; biases and norms (fewer than two dimensions) do not decay.

    Args:
        eight_bit: with moments of one byte, if it is AdamW.

    Raises:
        UserError: moments of one byte of another optimizer.
    """
    if eight_bit and inner.optimizer not in (None, "adamw"):
        raise UserError(f"adam_8bit=True: the run trains with {inner.optimizer}", "leave it off")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if inner.optimizer == "sgd":
        return torch.optim.SGD(named, lr=inner.learning_rate)
    hidden = [(n, p) for n, p in named if inner.optimizer == "muon" and is_hidden_matrix(n, p.shape)]
    taken = {name for name, _ in hidden}
    rest = [(name, parameter) for name, parameter in named if name not in taken]
    groups = [
        {"params": [(n, p) for n, p in rest if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [(n, p) for n, p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    chosen = [group for group in groups if group["params"]]
    if eight_bit:
        return AdamW8bit(chosen, lr=inner.learning_rate, betas=inner.betas, eps=inner.eps)
    adamw = torch.optim.AdamW(
        chosen, lr=inner.learning_rate, betas=inner.betas, eps=inner.eps,
        # One kernel for all parameters. On the CPU it rounds otherwise than the plain loop, and saves little.
        fused=True if named[0][1].device.type in FUSED_DEVICES else None,
    )
    if not hidden:
        return adamw
    return MuonAdamW(
        adamw, hidden, lr=inner.learning_rate, lr_ratio=inner.muon_learning_rate_ratio, momentum=inner.muon_momentum,
        weight_decay=inner.weight_decay,
    )


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The whole state as `<parameter name>.<field>`, the field one of AdamW's exp_avg, exp_avg_sq and step, or Muon's
    momentum_buffer; the tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    torchs = optimizer.adamw if isinstance(optimizer, MuonAdamW) else optimizer
    momentum = optimizer.momentum if isinstance(optimizer, MuonAdamW) else {}
    for name, parameter, kind in _named_parameters(optimizer):
        if kind == "muon":
            tensors[f"{name}.momentum_buffer"] = momentum[parameter]
            continue
        kept = torchs.moments(parameter) if isinstance(torchs, AdamW8bit) else torchs.state.get(parameter, {})
        for key, value in kept.items():
            if key in _FIELDS[kind]:
                tensors[f"{name}.{key}"] = value
    return tensors


def load_optimizer_tensors(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Replace the whole state by copies of `tensors`; what `optimizer_tensors` gave continues bit for bit.

    Raises:
        UserError: names or shapes that do not belong to these parameters. The optimizer is then unchanged.
    """
    parameters = {name: (parameter, kind) for name, parameter, kind in _named_parameters(optimizer)}
    loaded: dict[str, dict[str, Tensor]] = {}
    torchs = optimizer.adamw if isinstance(optimizer, MuonAdamW) else optimizer
    fused = bool(torchs.defaults.get("fused"))
    for key, tensor in tensors.items():
        name, _, field = key.rpartition(".")
        parameter, kind = parameters.get(name, (None, "sgd"))
        expected = _expected_shape(parameter, kind, field)
        if tensor.shape != expected or parameter is None:
            raise UserError(
                f"optimizer state {key!r} of shape {list(tensor.shape)}: this model has "
                + ("no such state" if expected is None else f"shape {list(expected)}"),
                "resume from a checkpoint of the same model",
            )
        # AdamW keeps its step count on the CPU, if it is not fused: then a kernel reads it on the device.
        place = parameter.device if fused else "cpu"
        own = tensor.to(place, torch.float32, copy=True) if field == "step" else as_parameter(tensor, parameter)
        loaded.setdefault(name, {})[field] = own
    for name, state in loaded.items():
        if set(state) != set(_FIELDS[parameters[name][1]]):
            raise UserError(f"optimizer state of {name!r} has only {sorted(state)}", "resume from another checkpoint")
    _replace_state(optimizer, {parameters[name][0]: state for name, state in loaded.items()})


def state_is_finite(optimizer: Optimizer) -> bool:
    """Or it would spoil the parameters at once."""
    return all(bool(local(tensor).isfinite().all()) for tensor in optimizer_tensors(optimizer).values())


def reset_state(optimizer: Optimizer) -> None:
    """Begin with an empty state."""
    load_optimizer_tensors(optimizer, {})


def _replace_state(optimizer: Optimizer, loaded: Mapping[Tensor, dict[str, Tensor]]) -> None:
    momentum = optimizer.momentum if isinstance(optimizer, MuonAdamW) else {}
    for parameter, buffer in momentum.items():
        if parameter in loaded:
            buffer.copy_(loaded[parameter]["momentum_buffer"])
        else:
            buffer.zero_()
    torchs = optimizer.adamw if isinstance(optimizer, MuonAdamW) else optimizer
    torchs.state.clear()
    for parameter, state in loaded.items():
        if isinstance(torchs, AdamW8bit):
            torchs.keep(parameter, state)
        elif parameter not in momentum:
            torchs.state[parameter] = state


def _expected_shape(parameter: Tensor | None, kind: str, field: str) -> torch.Size | None:
    if parameter is None or field not in _FIELDS[kind]:
        return None
    return torch.Size([]) if field == "step" else parameter.shape


def _named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, str]]:
    """(name, parameter, kind of optimizer) of everything that trains."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        kind = "sgd" if isinstance(optimizer, torch.optim.SGD | KeptGradient) else "adamw"
        if isinstance(optimizer, MuonAdamW) and index == len(groups) - 1:
            kind = "muon"
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            yield name, parameter, kind
