"""The state of a script's optimizer as named tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from peer.checkpoint.inventory import CheckpointError
from peer.errors import UserError
from peer.train.sharding import as_parameter

_NUMBER = "number"


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<place of the parameter>.<field>` -> tensor; numbers as fp64, `<place>.<field>.number`. Nothing is copied.

    Raises:
        CheckpointError: the state holds something else.
    """
    tensors: dict[str, Tensor] = {}
    for place, fields in optimizer.state_dict()["state"].items():
        for field, value in fields.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                tensors[f"{place}.{field}"] = value
            elif isinstance(value, int | float):
                tensors[f"{place}.{field}.{_NUMBER}"] = torch.tensor(float(value), dtype=torch.float64)
            elif value is not None:
                raise CheckpointError(
                    f"the state of {type(optimizer).__name__} holds {field!r}, which is neither a number nor a "
                    "tensor of fractions", "save it in the script, and set save_steps=0",
                )  # fmt: skip
    return tensors


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Replace the state by copies; what `state_tensors` gave continues bit for bit. Learning rates stay the script's.

    Raises:
        UserError: the state is of other parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        place, _, field = name.partition(".")
        fits = place.isdecimal() and int(place) < len(parameters)
        number = field.endswith(f".{_NUMBER}")
        most = 1 if number or tensor.ndim == 0 else parameters[int(place)].numel() if fits else 0
        if not fits or tensor.numel() > most or (number and not tensor.numel()):
            what = f"optimizer state {name[:64]!r} of shape {list(tensor.shape)[:8]}: the optimizer has no such"
            raise UserError(what, "resume with the optimizer that the script had")
        cut = not number and tensor.ndim > 0 and isinstance(parameters[int(place)], DTensor)
        value = float(tensor) if number else as_parameter(tensor, parameters[int(place)]) if cut else tensor.clone()
        kept = int(value) if isinstance(value, float) and value.is_integer() else value
        state.setdefault(int(place), {})[field.removesuffix(f".{_NUMBER}")] = kept
    try:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (KeyError, ValueError, RuntimeError) as error:
        what = f"the state does not fit {type(optimizer).__name__}: {type(error).__name__}: {str(error)[:200]}"
        raise UserError(what, "resume with the optimizer that the script had") from None
