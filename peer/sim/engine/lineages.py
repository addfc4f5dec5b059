"""The state from which a peer continues when it joins, and when the network splits and heals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peer.outer.recipe.recipe import Recipe
from peer.sim.engine.learners import LearnerFactory
from peer.sim.engine.swarm import clones
from peer.sim.learner.replica import Learner, OuterCopy, SimReplica


class Lineages:
    """The outer states of a swarm: one that all share, one of each side of a partition, or one of each peer.

    Args:
        recipe: whether anchors are shared, and which other state a peer holds.
        assembly: the fresh parts of a newcomer; None where only time is simulated, and there is no state.
    """

    def __init__(self, recipe: Recipe, replicas: Sequence[SimReplica], assembly: LearnerFactory | None) -> None:
        self._recipe, self._replicas, self._assembly = recipe, replicas, assembly
        learner = replicas[0].learner
        self._shared: OuterCopy | None = learner.outer if learner is not None and recipe.shared_anchor else None
        self._fork = torch.empty(0)

    def join(self, replica: SimReplica, donor: SimReplica | None) -> None:
        """A newcomer takes the anchor and starts with fresh moments; with gradients, everything of another peer."""
        learner = replica.learner
        if learner is None:
            return
        assert self._assembly is not None
        learner.optimizer = self._assembly.optimizer(learner.trained.on_device)
        learner.encoders = self._assembly.encoders(replica.index)
        if self._recipe.payload != "gradient":
            replica.steps_since_join = 0
        if learner.own is not None:
            learner.own.forget()
        if donor is not None and donor.learner is not None:
            self._copy_state(learner, donor.learner)
        elif self._recipe.payload == "delta":
            learner.take_anchor()

    def split(self) -> None:
        """Give each side of a split swarm its own outer state."""
        if self._shared is None:
            return
        copies = {0: self._shared}
        for replica in self._replicas:
            if replica.learner is not None:
                replica.learner.carry_over()  # so that all progress counts from the fork
                copies.setdefault(replica.side, self._shared.clone())
                replica.learner.outer = copies[replica.side]
        self._fork = self._shared.anchor.clone()

    def heal(self, winner: SimReplica, losers: Sequence[SimReplica]) -> None:
        """The others keep what they learned since the split on top of the winning anchor; with gradients, nothing.

        Args:
            winner: a peer of the side that made more steps.
            losers: all peers of the other sides.
        """
        for replica in losers:
            if replica.learner is None or winner.learner is None:
                continue
            if clones(self._recipe):
                self._copy_state(replica.learner, winner.learner)
            elif self._shared is not None:
                replica.learner.parameters.add_(winner.learner.outer.anchor - self._fork)
                replica.learner.take_lineage(winner.learner.outer)
        if self._shared is not None and winner.learner is not None:
            self._shared = winner.learner.outer

    def _copy_state(self, learner: Learner, donor: Learner) -> None:
        """All but what is a peer's own: its data, its moments between rounds, its residual."""
        recipe = self._recipe
        if recipe.shared_anchor:
            learner.outer = donor.outer
        else:
            learner.outer.copy_from(donor.outer)
        if recipe.payload == "delta":
            learner.take_anchor()
        else:
            learner.parameters.copy_(donor.parameters)
        if learner.estimate is not None:
            learner.estimate.copy_(learner.parameters)
        if donor.shadow is not None:
            learner.restart_shadow(donor.shadow.anchor)
