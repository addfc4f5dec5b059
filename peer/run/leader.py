"""Rank 0 of a peer with several devices: a trainer whose steps, vectors and optimizer are those of all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peer.link.local_anchor import InnerLoop
from peer.link.memory import HEAD_BYTES, SharedState
from peer.link.shared_vectors import SharedVectors
from peer.protocol.manifest import RunManifest
from peer.run.follower import fixed_tensors
from peer.settings import PeerSettings
from peer.train.batch import Batch
from peer.train.compute import Compute
from peer.train.optim import Optimizer, load_optimizer_tensors, optimizer_tensors, reset_state
from peer.train.orders import RankLeader, RankOrder, gathered, send_document, send_tensors, share_tensors
from peer.train.step import StepResult, Trainer


def begin_leader(
    settings: PeerSettings, manifest: RunManifest, vocab_size: int, compute: Compute, model: PreTrainedModel
) -> RankLeader:
    """Tell the others what to build, and give them what no anchor holds.

    Args:
        model: on the CPU.
    """
    leader = RankLeader(compute.ranks, SharedVectors())
    send_document(compute.ranks, {
        "manifest": manifest.model_dump(mode="json"), "vocab_size": vocab_size, "pid": os.getpid(),
        "compute": {one.name: getattr(compute, one.name) for one in fields(compute) if one.name != "ranks"},
        "threads": torch.get_num_threads(), "tf32": settings.tf32,
    })  # fmt: skip
    share_tensors(compute.ranks, fixed_tensors(model))
    return leader


def share_memory(leader: RankLeader, memory: SharedState, descriptor: int) -> None:
    """All ranks map the outer state, and what rank 0 keeps beside it."""
    leader.vectors.know(descriptor, memory.anchor, HEAD_BYTES)
    memory.private = leader.vectors.empty


class RanksTrainer(Trainer):
    """Makes steps together with the other ranks.

    Args:
        leader: tells them.
        arguments, named: of `Trainer`.
    """

    def __init__(self, leader: RankLeader, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.leader = leader

    def step(self, batch: Batch | Tensor) -> StepResult:
        """As `Trainer.step`, of a whole batch."""
        return super().step(self.leader.deal(Batch.of(batch), self._lr_at()))


def trainer_of(leader: RankLeader | None, model: PreTrainedModel, *arguments: Any, **named: Any) -> Trainer:
    """The trainer of one device, or of all that `leader` tells what to do; arguments as of `Trainer`."""
    if leader is None:
        return Trainer(model, *arguments, **named)
    if leader.ranks.sharded:
        _order_forward(leader, model)
    return RanksTrainer(leader, model, *arguments, **named)


def _order_forward(leader: RankLeader, model: PreTrainedModel) -> None:
    """Whenever rank 0 runs a sharded model by itself, to validate it or to write a text, the others take part."""
    def before(*_: object) -> None:
        if not torch.is_grad_enabled():
            leader.order(RankOrder.FORWARD)

    model.register_forward_pre_hook(before, prepend=True)  # before anything is gathered


class RanksLoop:
    """The `InnerLoop` of all ranks.

    Args:
        own: that of rank 0.
    """

    def __init__(self, leader: RankLeader, own: InnerLoop) -> None:
        self._leader, self._own = leader, own

    def begin_round(self, anchor: Tensor) -> None:
        """See `InnerLoop`."""
        self._leader.on_vector(RankOrder.ROUND, anchor)
        self._own.begin_round(anchor)


class OptimizerState:
    """The state of the inner optimizer on all ranks; alone without a `leader`."""

    def __init__(self, optimizer: Optimizer, leader: RankLeader | None) -> None:
        self._optimizer, self._leader = optimizer, leader

    def reset(self) -> None:
        """Begin with an empty state."""
        if self._leader is not None:
            self._leader.order(RankOrder.RESET)
        reset_state(self._optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """See `optimizer_tensors`; whole ones."""
        if self._leader is None or not self._leader.ranks.sharded:
            return optimizer_tensors(self._optimizer)
        self._leader.order(RankOrder.GATHER)
        return {name: tensor.cpu() for name, tensor in gathered(self._optimizer)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `load_optimizer_tensors`."""
        load_optimizer_tensors(self._optimizer, tensors)  # which refuses what does not fit
        if self._leader is not None:
            self._leader.order(RankOrder.LOAD)
            send_tensors(self._leader.ranks, tensors)
