"""A rank other than 0: its model, its optimizer, and what it does for each order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peer.link.shared_vectors import VectorsOf
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest
from peer.run.local_rule import hook_of, second_model
from peer.train.compute import Compute, prepare
from peer.train.compute_limit import ComputeLimit
from peer.train.device import set_threads
from peer.train.gradient import KeptGradient
from peer.train.model import build_skeleton
from peer.train.moments import InnerMoments
from peer.train.optim import build_optimizer, load_optimizer_tensors, reset_state
from peer.train.orders import (
    RankOrder,
    RankParts,
    dealt,
    gathered,
    next_order,
    place_in,
    receive_document,
    receive_tensors,
    send_far,
    share_tensors,
)
from peer.train.precision import allow_tf32
from peer.train.rank_part import RankPart
from peer.train.ranks import Ranks
from peer.train.sharding import place
from peer.train.step import Trainer


def fixed_tensors(model: nn.Module) -> list[Tensor]:
    """What rank 0 gives the others once: frozen parameters and buffers, which no anchor holds."""
    frozen = [parameter.detach() for parameter in model.parameters() if not parameter.requires_grad]
    return [*frozen, *model.buffers()]


class NoSteps(torch.optim.Optimizer):
    """In place of a `KeptGradient`, of which rank 0 has the only one where each rank has all gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([named for named in model.named_parameters() if named[1].requires_grad], {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep nothing."""


class RankWorker:
    """Builds what rank 0 describes."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        said = receive_document(ranks)
        plan = RunPlan.of(RunManifest.model_validate(said["manifest"]))
        recipe, self._vectors = plan.recipe, VectorsOf(said["pid"])
        set_threads(said["threads"])
        allow_tf32(said["tf32"])
        torch.manual_seed(plan.manifest.seed + ranks.rank)  # of dropout: no two ranks drop the same
        compute, self._rate = Compute(**said["compute"], ranks=ranks), 0.0
        model, again = self._model(plan, said["vocab_size"], device, compute)
        layout, inner = FlatLayout.of(model, recipe.cut), recipe.inner_settings(plan.manifest.inner)
        self._optimizer: Any = self._optimizer_of(recipe, model, layout, inner, compute.eight_bit)
        hook, second = hook_of(recipe.local, model, layout, self._optimizer, inner, compute, again)
        hook.limit = ComputeLimit.of(recipe.straggler.timeout, device, recipe.gradients_per_step)
        parts: list[RankPart | InnerMoments] = [
            RankPart(layout, one, ranks) for one in (model, second) if one is not None
        ]
        if recipe.moments is not None:
            parts += [InnerMoments(layout, model, self._optimizer, second, ranks) for second in (False, True)]
        parts += [self._optimizer.own] if isinstance(self._optimizer, KeptGradient) else []
        self._parts = RankParts(ranks, self._vectors, parts)
        self._hook = hook
        self._trainer = Trainer(model.train(), self._optimizer, inner, lambda: self._rate, hook=hook, compute=compute)

    def _model(
        self, plan: RunPlan, vocab_size: int, device: torch.device, compute: Compute
    ) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """-> (the model on its device, the second one where the ranks share them)"""
        model = build_skeleton(plan.manifest.model, vocab_size)
        model.to_empty(device="cpu")  # pages that no one writes to take no memory
        model.tie_weights()
        share_tensors(self._ranks, fixed_tensors(model))
        again = second_model(plan.recipe, model, device, self._ranks)
        place(model, device, self._ranks)
        prepare(model, compute)
        return model, again

    def _optimizer_of(
        self, recipe: Recipe, model: PreTrainedModel, layout: FlatLayout, inner: Any, eight_bit: bool
    ) -> Any:
        if recipe.payload != "gradient":
            return build_optimizer(model, inner, eight_bit)
        if not self._ranks.sharded:
            return NoSteps(model)
        return KeptGradient(model, layout, scaled=recipe.accumulates, ranks=self._ranks)

    @torch.no_grad()
    def _forward(self) -> None:
        """Give rank 0 what it gathers for a forward pass of its own, by making one alike."""
        training = self._trainer.model.training
        self._trainer.model.train(False)
        self._trainer.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self._device), use_cache=False)
        self._trainer.model.train(training)

    def follow(self) -> None:
        """Do as ordered until rank 0 says stop."""
        while True:
            kind, numbers = next_order(self._ranks)
            if kind == RankOrder.STOP:
                return
            self._do(kind, numbers)

    def _do(self, kind: RankOrder, numbers: Sequence[int]) -> None:
        if kind == RankOrder.STEP:
            batch, self._rate = dealt(self._ranks, numbers)
            self._trainer.step(batch)
        elif kind in (RankOrder.READ, RankOrder.WRITE):
            self._parts.move(kind, numbers)
        elif kind == RankOrder.ROUND:
            where, _ = place_in(numbers)
            anchor = torch.empty(where.numel) if self._ranks.is_far else self._vectors.at(where)
            if self._ranks.is_far:
                send_far(self._ranks, anchor)
            self._hook.begin_round(anchor)
        elif kind == RankOrder.RESET:
            reset_state(self._optimizer)
        elif kind == RankOrder.GATHER:
            for _ in gathered(self._optimizer):
                pass
        elif kind == RankOrder.FORWARD:
            self._forward()
        elif kind == RankOrder.LOAD:
            load_optimizer_tensors(self._optimizer, receive_tensors(self._ranks))
