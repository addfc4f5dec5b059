"""The initial values of a model that only scripts can build: a safetensors file of its trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout, trained_parameters

COMPILED = "_orig_mod"  # where torch.compile keeps a model
HINT = "write the file with atoll.save_weights(model, path)"


def layout_of(model: nn.Module) -> FlatLayout:
    """Where each trainable parameter of a script's model lies in the flat vector.

    Raises:
        UserError: there is none.
    """
    named = trained_parameters(model)
    if not named:
        raise UserError("the model has no trainable parameter", "set requires_grad on those that the swarm trains")
    return FlatLayout.of_named((name, tuple(one.shape)) for name, one in named.items())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose names the swarm knows, where `DistributedDataParallel` or `torch.compile` wraps it."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, COMPILED):
        model = model.module if isinstance(model, DistributedDataParallel) else getattr(model, COMPILED)
    return model


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write the trainable parameters of a model, fp32: what `model.weights` in a manifest names.

    Of a model that several processes train, each makes this call, and rank 0 writes.
    """
    named = {}
    for name, one in trained_parameters(unwrapped(model)).items():
        values = one.detach()
        named[name] = (values.full_tensor() if isinstance(values, DTensor) else values).float().cpu().contiguous()
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(named, path)


def layout_of_file(path: Path) -> FlatLayout:
    """The layout of the parameters in a file; reads its header alone.

    Raises:
        UserError: no such file, or nothing in it.
    """
    with _opened(path) as file:
        named = [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
    if not named:
        raise UserError(f"model.weights: {path} holds no tensor", HINT)
    return FlatLayout.of_named(named)


def read_weights(path: Path) -> Tensor:
    """The flat vector of the parameters in a file, fp32 [P].

    Raises:
        UserError: no such file, or values that are not finite.
    """
    with _opened(path) as file:
        flat = torch.cat([file.get_tensor(name).float().flatten() for name in sorted(file.keys())])
    if not bool(flat.isfinite().all()):
        raise UserError(f"model.weights: {path} holds values that are not finite (NaN or infinity)", HINT)
    return flat


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.weights: {path} cannot be read: {error}", HINT) from None
