"""What a recipe's local rule adds to the trainer of a peer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from peer.link.second_trajectory import LocalParameters, SecondTrajectory
from peer.outer.policy.local_rules import LocalRule
from peer.outer.policy.regular import Regular
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.outer.state.own_part import OwnPart
from peer.protocol.manifest import InnerSpec
from peer.train.compute import DEFAULT, Compute, prepare
from peer.train.hook import StepHook
from peer.train.local_rule import ReplayHook, RuleHook, SpiderHook
from peer.train.optim import Optimizer, build_optimizer
from peer.train.ranks import Ranks
from peer.train.sharding import place
from peer.train.step import Trainer


def hook_of(
    rule: LocalRule, model: PreTrainedModel, layout: FlatLayout, optimizer: Optimizer, inner: InnerSpec,
    compute: Compute = DEFAULT, again: PreTrainedModel | None = None,
) -> tuple[StepHook, PreTrainedModel | None]:  # fmt: skip
    """What acts on the steps of a model that is on its device, and the model that the rule trains beside it.

    Args:
        layout: of the anchor.
        optimizer: of the model.
        inner: of all optimizers.
        compute: how this peer computes.
        again: a second model on its device, for a rule that replays; None: a copy of the first.
    """
    if not rule.replays:
        return (RuleHook(rule, model, layout) if rule.reads_anchor else StepHook()), None
    again = copy.deepcopy(model) if again is None else again
    prepare(again, compute)

    def second(rate: Callable[[], float]) -> Trainer:
        optimizer, hook = build_optimizer(again, inner), SpiderHook(again, layout)
        return Trainer(again.train(), optimizer, inner, rate, compute=compute, hook=hook)

    return ReplayHook(model, layout, optimizer, second), again


def second_model(
    recipe: Recipe, model: PreTrainedModel, device: torch.device, ranks: Ranks
) -> PreTrainedModel | None:
    """What a rule that replays trains beside a model that ranks share, and that cannot be copied once they do.

    Args:
        model: on the CPU.
    """
    if not (recipe.local.replays and ranks.sharded):
        return None
    again = copy.deepcopy(model)
    place(again, device, ranks)
    return again


def trajectory_of(
    rule: LocalRule, layout: FlatLayout, again: PreTrainedModel | None,
    replica_of: Callable[[PreTrainedModel], LocalParameters],
) -> SecondTrajectory | None:  # fmt: skip
    """The trajectory of the second model that `hook_of` gives."""
    return None if again is None else SecondTrajectory(replica_of(again), rule.kept, layout.numel)


def kept_beside(recipe: Recipe) -> tuple[str, ...]:
    """The vectors that a peer keeps beside its parameters, and that its checkpoints hold."""
    if recipe.merge.eager:
        return OwnPart.names(recipe.optimizer)
    return SecondTrajectory.NAMES if recipe.local.replays else ()


def rule_bytes(recipe: Recipe, device: torch.device) -> tuple[int, int]:
    """What the local rule, an eager merge and fragments that wait for theirs keep for each parameter, at most:
    (on the device, in RAM); without a device of its own, the anchor is there anyway.
    """
    rule, early = recipe.local, len(kept_beside(recipe)) if recipe.merge.eager else 0
    put_off = 2 * (isinstance(recipe.schedule, Regular) and recipe.schedule.spans_rounds)
    copies = rule.device_vectors + (rule.reads_anchor and device.type != "cpu")
    return 4 * copies, 4 * (rule.ram_vectors + early + put_off)
