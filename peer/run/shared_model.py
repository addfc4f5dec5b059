"""The model as a peer's processes and its agent share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from peer.link.local_anchor import InnerParts, LocalAnchor
from peer.link.memory import Head, SharedState
from peer.link.messages import Mapped
from peer.link.second_trajectory import LocalParameters
from peer.link.supervisor import AgentProcess
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.outer.state.outer_state import digest_of
from peer.run.leader import share_memory
from peer.run.resume import CHAIN_FILE, Resumed
from peer.train.moments import InnerMoments
from peer.train.optim import Optimizer
from peer.train.orders import RankLeader, RanksReplica
from peer.train.rank_part import RankPart
from peer.train.replica import DeviceCopies, ModelReplica
from peer.train.sharding import is_sharded


def local_anchor(shared: SharedModel, recipe: Recipe, device: torch.device, inner: InnerParts) -> LocalAnchor:
    """The local parameters of this process, and the anchor that they were trained from."""
    local = LocalAnchor(
        shared.memory, shared.replica, recipe.optimizer, recipe.late_merge, shared.layout.sizes, inner
    )
    if device.type == "cuda" and isinstance(shared.replica, ModelReplica):
        local.copies = DeviceCopies(shared.replica, device)
    return local


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """The model as this process and its agent see it."""

    layout: FlatLayout
    memory: SharedState
    replica: ModelReplica | RanksReplica
    mapped: Mapped


def share(
    agent: AgentProcess, model: nn.Module, recipe: Recipe, resumed: Resumed | None = None,
    layout: FlatLayout | None = None,
) -> SharedModel:  # fmt: skip
    """The shared memory with the genesis anchor in it; on resume with the resumed state, and the model likewise.

    Args:
        layout: of the model; None: of all its parameters, in the recipe's fragments.
    """
    layout, optimizer = layout or FlatLayout.of(model, recipe.cut), recipe.optimizer
    largest = max(layout.sizes, default=layout.numel)
    memory = SharedState(agent.memory_descriptor, layout.numel, optimizer.num_buffers, largest)
    cut = is_sharded(model)  # then only all ranks together can copy it
    if not cut:
        layout.copy_to_flat(model, memory.anchor)
    for buffer, value in zip(memory.buffers, optimizer.initial_values, strict=True):
        buffer.fill_(value)
    if resumed is not None:
        _fill_memory(memory, resumed, layout.sizes)
        if not cut:
            layout.copy_from_flat(resumed.tensors["inner"]["parameters"], model)
    mapped = Mapped(
        numel=layout.numel,
        num_buffers=optimizer.num_buffers,
        shapes=layout.shapes,
        fragments=layout.sizes,
        hidden=layout.hidden,
        chain_path=str(resumed.folder / CHAIN_FILE) if resumed and (resumed.folder / CHAIN_FILE).exists() else None,
    )
    return SharedModel(layout=layout, memory=memory, replica=ModelReplica(layout, model), mapped=mapped)


def replica_of(
    layout: FlatLayout, model: nn.Module, leader: RankLeader | None, number: int = 0
) -> ModelReplica | RanksReplica:
    """The parameters of a model on its device, or on those of all ranks."""
    if leader is None:
        return ModelReplica(layout, model)
    return RanksReplica(leader, RankPart(layout, model, leader.ranks), number)


def moments_of(
    recipe: Recipe, model: nn.Module, layout: FlatLayout, optimizer: Optimizer, leader: RankLeader | None, number: int
) -> Sequence[LocalParameters]:
    """The first and the second moments of the inner optimizer, if peers average them.

    Args:
        number: of the first moments among what all ranks copy.
    """
    if recipe.moments is None:
        return ()
    if leader is None:
        return [InnerMoments(layout, model, optimizer, second) for second in (False, True)]
    parts = [InnerMoments(layout, model, optimizer, second, leader.ranks) for second in (False, True)]
    return [RanksReplica(leader, part, number + index) for index, part in enumerate(parts)]


def of_all_ranks(
    shared: SharedModel, leader: RankLeader | None, model: nn.Module, agent: AgentProcess, resumed: Resumed | None
) -> SharedModel:
    """The same for all ranks, once the model is on its device."""
    if leader is None:
        return shared
    share_memory(leader, shared.memory, agent.memory_descriptor)
    replica = replica_of(shared.layout, model, leader)
    if resumed is not None:
        replica.write(resumed.tensors["inner"]["parameters"])
    return replace(shared, replica=replica)


def _fill_memory(memory: SharedState, resumed: Resumed, sizes: Sequence[int]) -> None:
    """The resumed outer state becomes the shared state; its agent verifies it against the chain."""
    outer = resumed.tensors["outer"]
    memory.anchor.copy_(outer["anchor"])
    for index, buffer in enumerate(memory.buffers):
        buffer.copy_(outer[f"buffer{index}"])
    memory.head = Head(
        round=resumed.state["progress"]["round"],
        lineage_id=resumed.state["lineage_id"],
        state_digest=digest_of((memory.anchor, *memory.buffers), sizes or None),
    )
