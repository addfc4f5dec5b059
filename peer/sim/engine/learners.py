"""Builds what each simulated peer starts with; peers share what they may, so that hundreds fit one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peer.outer.compress.feedback import Encoder
from peer.outer.policy.local_rules import Spider
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.own_part import OwnPart
from peer.protocol.manifest import InnerSpec
from peer.sim.learner.inner_optimizers import inner_optimizer
from peer.sim.learner.placed import Placed
from peer.sim.learner.replica import Learner, OuterCopy, Shadow
from peer.sim.learner.task import Task
from peer.sim.round.aggregation import Synchroniser
from peer.sim.world.network import links_of
from peer.sim.world.scenario import NetworkSplit, PeerProfile


class LearnerFactory:
    """Learners of one simulation, and the fresh parts of a newcomer.

    Args:
        inner: optimizer and learning rates, with all that the recipe leaves open filled in.
    """

    def __init__(
        self, task: Task, recipe: Recipe, inner: InnerSpec, sync: Synchroniser, profiles: Sequence[PeerProfile],
        partitions: Sequence[NetworkSplit],
    ) -> None:
        self._task, self._recipe, self._inner, self._sync, self._profiles = task, recipe, inner, sync, profiles
        shared = recipe.payload == "gradient"  # then the outer optimizer makes every step
        self.optimizer = inner_optimizer("sgd" if shared else str(inner.optimizer), task.layout, inner)
        misses = some_miss_rounds(recipe, profiles, partitions)
        # A peer can be on its way from another anchor than the one that all share by then.
        self._holds_base = recipe.payload == "delta" and recipe.shared_anchor and misses
        self._revertible = recipe.feedback is not None and (misses or rounds_may_fail(recipe, profiles))
        self._shared_outer: OuterCopy | None = None
        self._scratch = Placed.of(torch.empty(task.layout.numel), task.device)

    def learner(self, index: int) -> Learner:
        """Of one peer, before its first step."""
        task, recipe = self._task, self._recipe
        parameters, device = task.initial(), task.device
        trained, replays = Placed.of(parameters, device), recipe.local.replays
        own_slope = recipe.payload == "gradient"
        learner = Learner(
            task=task, recipe=recipe, inner=self._inner, trained=trained, optimizer=self.optimizer(trained.on_device),
            batches=task.batches(index),
            slope=Placed.of(torch.empty_like(parameters), device) if own_slope else self._scratch,
            outer=self._outer(), encoders=self.encoders(index),
            spider=Spider() if replays else None,
            estimate=trained.in_ram.clone() if recipe.merge.second_iterate else None,
            base=trained.in_ram.clone() if self._holds_base else None,
            own=OwnPart(recipe.outer, task.layout.numel) if recipe.merge.eager else None,
        )
        if replays:
            copy = Placed.of(trained.in_ram.clone(), device)
            learner.shadow = Shadow(trained.in_ram.clone(), copy, self.optimizer(copy.on_device))
        return learner

    def encoders(self, index: int) -> list[Encoder]:
        """Of one peer, one per fragment, with empty residuals."""
        encoders, recipe = [], self._recipe
        for fragment, length in enumerate(self._sync.lengths):
            own = recipe.allocator.codec_of(index, links_of(self._profiles), self._sync.codecs[fragment])
            encoders.append(Encoder(own, recipe.feedback, length, revertible=self._revertible))
        return encoders

    def _outer(self) -> OuterCopy:
        if self._shared_outer is not None:
            return self._shared_outer
        outer = first_outer(self._recipe, self._task)
        if self._recipe.shared_anchor:
            self._shared_outer = outer
        return outer


def first_outer(recipe: Recipe, task: Task) -> OuterCopy:
    """The outer state before the first round; empty for recipes without an anchor."""
    if recipe.payload == "parameters":
        return OuterCopy(torch.empty(0), [])
    anchor = task.initial()
    return OuterCopy(anchor, [torch.full_like(anchor, value) for value in recipe.optimizer.initial_values])


def some_miss_rounds(recipe: Recipe, profiles: Sequence[PeerProfile], partitions: Sequence[NetworkSplit]) -> bool:
    """Whether a round can be over without a peer that learns."""
    stay = all(profile.presence == PeerProfile().presence for profile in profiles) and not partitions
    return not (recipe.straggler.waits_for_all and stay)


def rounds_may_fail(recipe: Recipe, profiles: Sequence[PeerProfile]) -> bool:
    """Whether a contribution can be lost although no peer misses a round: at the latest when training ends."""
    paces = {(profile.speed, profile.jitter > 0.0) for profile in profiles}
    in_step = len(paces) == 1 and not any(jitters for _, jitters in paces)
    return recipe.votes is not None or not in_step
