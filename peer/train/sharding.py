"""Models of which each rank holds a part of every parameter, of its gradient and of its moments (FSDP2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from peer.train.ranks import Ranks


def place(model: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
    """Bring a model from the CPU to its device: all of it, or where ranks share it the part of this one.

    A transformer block is gathered when it computes, and freed after it; the rest of the model is one more such part.
    """
    if not ranks.sharded:
        model.to(device)  # type: ignore[arg-type]
        return
    mesh = init_device_mesh(device.type, (ranks.count,))
    blocks = set(model._no_split_modules or ())
    for module in [one for one in model.modules() if type(one).__name__ in blocks]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether other ranks hold parts of it."""
    return any(isinstance(one, DTensor) for one in model.parameters())


def gather_no_more(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward pass has gathered: it would be old after the next write."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(whole: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a whole tensor of a parameter's shape; a view."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    rows = -(-len(whole) // mesh.size())
    return whole[mesh.get_local_rank() * rows :][:rows]


def held(own: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds, as its part of a tensor of a parameter's shape; of a whole parameter as it is."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def as_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a tensor of a parameter's shape, whole or held as that is: in fp32, held as that is."""
    own = local(tensor) if isinstance(tensor, DTensor) else own_rows(tensor, parameter)
    return held(own.to(parameter.device, torch.float32, copy=True), parameter)
