"""One simulated peer: its parameters, inner optimizer and data, and its position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from peer.outer.compress.feedback import Encoder
from peer.outer.policy.local_rules import Spider
from peer.outer.policy.schedules import ChangeState
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.own_part import OwnPart
from peer.protocol.manifest import InnerSpec
from peer.sim.learner.inner_optimizers import InnerOptimizer
from peer.sim.learner.placed import Placed
from peer.sim.learner.task import Task
from peer.sim.world.scenario import PeerProfile


@dataclass
class OuterCopy:
    """One lineage's outer state: shared by all peers that agree on it, or a peer's own in gossip."""

    anchor: Tensor
    buffers: list[Tensor]
    rounds: int = 0

    def clone(self) -> OuterCopy:
        """An independent copy."""
        return OuterCopy(self.anchor.clone(), [buffer.clone() for buffer in self.buffers], self.rounds)

    def copy_from(self, other: OuterCopy) -> None:
        """Take over the values of another."""
        for mine, theirs in zip([self.anchor, *self.buffers], [other.anchor, *other.buffers], strict=True):
            mine.copy_(theirs)
        self.rounds = other.rounds


@dataclass
class Shadow:
    """FedGLOMO's second trajectory: the same batches from the previous anchor (arXiv 2012.04061, algorithm 1)."""

    anchor: Tensor
    parameters: Placed
    optimizer: InnerOptimizer
    spider: Spider = field(default_factory=Spider)


@dataclass
class Learner:
    """The mathematics of one peer between rounds.

    Attributes:
        trained: fp32 [P], the parameters.
        slope: fp32 [P], the gradient: this peer's own when the recipe sends gradients, else one scratch vector for all.
        encoders: one per fragment; they hold the residual of error feedback.
        estimate: fp32 [P], the second iterate of a2cid2.
        base: fp32 [P], the anchor that the peer started from, where it may be an old one (asynchronous rounds).
        own: its share of the round that is under way, where the recipe says so (eager updates).
        draws: of the recipe's local rule, alike on peers that keep pace.
        share: of the planned micro-batches, in the mean of the present step.
    """

    task: Task
    recipe: Recipe
    inner: InnerSpec
    trained: Placed
    optimizer: InnerOptimizer
    batches: Iterator[Tensor]
    slope: Placed
    outer: OuterCopy
    encoders: list[Encoder]
    shadow: Shadow | None = None
    spider: Spider | None = None
    estimate: Tensor | None = None
    mixed_at: int = 0
    base: Tensor | None = None
    own: OwnPart | None = None
    draws: Random = field(default_factory=lambda: Random(0))
    skipped: int = 0
    share: float = 1.0

    @property
    def parameters(self) -> Tensor:
        """As rounds have them: fp32 [P] in RAM."""
        return self.trained.in_ram

    @property
    def gradient(self) -> Tensor:
        """As rounds have it: fp32 [P] in RAM."""
        return self.slope.in_ram

    @property
    def iterates(self) -> tuple[Tensor, ...]:
        """What a round moves: the parameters, and the second iterate, if there is one."""
        return (self.parameters,) if self.estimate is None else (self.parameters, self.estimate)

    def step(self, lr: float, fraction: float = 1.0) -> tuple[float, float]:
        """One inner step, or only its gradient when the recipe sends gradients.

        Args:
            fraction: of the batch that is computed before a compute timeout.

        Returns:
            loss and gradient norm.
        """
        planned, timeout = next(self.batches), self.recipe.straggler.timeout
        batch = planned if fraction == 1.0 else planned[: max(1, round(fraction * len(planned)))]
        self.share = len(batch) / len(planned) if timeout is not None and timeout.fixed else 1.0
        before = self.parameters.clone() if self.estimate is not None else None
        if self.recipe.payload == "gradient":
            return self._evaluate(self.trained.on_device, batch)
        anchor = self.outer.anchor if self.base is None else self.base
        loss, norm = self._train(self.trained, self.optimizer, batch, lr, anchor, self.spider)
        if self.shadow is not None:
            shadow = self.shadow
            self._train(shadow.parameters, shadow.optimizer, batch, lr, shadow.anchor, shadow.spider)
        if before is not None and self.estimate is not None:
            self.estimate.add_(self.parameters - before)
        return loss, norm

    def _train(
        self,
        trained: Placed,
        optimizer: InnerOptimizer,
        batch: Tensor,
        lr: float,
        anchor: Tensor,
        spider: Spider | None,
    ) -> tuple[float, float]:
        parameters, gradient, rule = trained.on_device, self.slope.on_device, self.recipe.local
        loss, norm = self._evaluate(parameters, batch)
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.skipped += 1
            return loss, norm
        if rule.reads_anchor:
            anchor = anchor.to(parameters.device)
        if spider is not None:
            spider.on_gradient(gradient, parameters, anchor, lambda at: self._gradient_at(at, batch))
        clip_(gradient, self.inner.max_grad_norm)
        rule.on_gradient(gradient, parameters, anchor)
        optimizer.step(gradient, lr)
        for _ in range(rule.times(self.draws)):
            rule.after_step(parameters, anchor, lr)
        return loss, norm

    def take_anchor(self) -> None:
        """Start from the anchor."""
        self.parameters.copy_(self.outer.anchor)
        self.take_lineage(self.outer)

    def take_lineage(self, outer: OuterCopy) -> None:
        """Continue with these parameters from another anchor."""
        self.outer = outer
        if self.base is not None:
            self.base.copy_(outer.anchor)

    def carry_over(self) -> None:
        """A round did not wait for this peer: the anchor of now, with its own progress on top."""
        if self.base is not None:
            self.parameters.add_(self.outer.anchor - self.base)
            self.base.copy_(self.outer.anchor)

    def restart_shadow(self, anchor_before: Tensor) -> None:
        """A new round: the second trajectory starts from the anchor that the first one started from before."""
        assert self.shadow is not None
        assert self.spider is not None
        self.shadow.anchor.copy_(anchor_before)
        self.shadow.parameters.in_ram.copy_(anchor_before)
        self.shadow.optimizer.copy_from(self.optimizer)
        self.shadow.spider.begin_round()
        self.spider.begin_round()

    def _evaluate(self, parameters: Tensor, batch: Tensor) -> tuple[float, float]:
        gradient = self.slope.on_device
        return self._gradient_into(gradient, parameters, batch), float(gradient.norm())

    def _gradient_at(self, parameters: Tensor, batch: Tensor) -> Tensor:
        out = torch.empty_like(parameters)
        self._gradient_into(out, parameters, batch)
        return out

    def _gradient_into(self, out: Tensor, parameters: Tensor, batch: Tensor) -> float:
        loss = self.task.gradient(parameters, batch, out)
        if self.share < 1.0:
            out.mul_(self.share)
        return loss


@dataclass
class SimReplica:
    """The state of one peer in virtual time; `learner` is None when only time is simulated.

    Attributes:
        position: inner steps in the schedule's coordinate, equal on peers that keep pace.
        life: counts its returns; events of an earlier life are void.
        unsent_tokens: learned from since the last contribution, per fragment.
        busy_s: virtual seconds of computing.
    """

    index: int
    profile: PeerProfile
    learner: Learner | None
    unsent_tokens: list[int]
    position: int = 0
    life: int = 0
    present: bool = False
    side: int = 0
    steps: int = 0
    steps_since_join: int = 10**9
    busy_s: float = 0.0
    present_s: float = 0.0
    arrived_s: float = 0.0
    bytes_sent: float = 0.0
    base_round: int = 0
    vote: bool = False
    vote_state: ChangeState = field(default_factory=ChangeState)

    def count_step(self, tokens: int) -> None:
        """It has made a step and learned from so many tokens."""
        self.position += 1
        self.steps += 1
        self.steps_since_join += 1
        for fragment in range(len(self.unsent_tokens)):
            self.unsent_tokens[fragment] += tokens


def clip_(gradient: Tensor, max_norm: float) -> None:
    """Scale to at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    gradient.mul_(torch.clamp(max_norm / (gradient.norm() + 1e-6), max=1.0))

