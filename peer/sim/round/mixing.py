"""Averages of parameters among a few peers, in place; what each has learned since it sent stays on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.outer.math.ranges import Ranges, put, take
from peer.outer.state.gossip_mixing import mix_, move_, pair_
from peer.sim.learner.replica import Learner
from peer.sim.round.contribution import Moves


@dataclass(frozen=True)
class SecondIterates:
    """A2CiD2's second iterate (arXiv 2306.08289): how fast it draws the first, and how far a pair moves it.

    Attributes:
        eta: per round.
        alpha_tilde: of the difference between two peers.
    """

    eta: float = 0.0
    alpha_tilde: float = 0.0

    def mix_to(self, round: int, learner: Learner) -> None:
        """Let the two iterates mix until `round`, if the recipe has a second one."""
        if learner.estimate is not None:
            mix_(learner.parameters, learner.estimate, self.eta, float(round - learner.mixed_at))
            learner.mixed_at = round

    def pair(self, learners: Sequence[Learner], sent: Sequence[Tensor], *, replaces: bool) -> None:
        """Two learners meet; `sent` is what each sent, fp32 [P]; `replaces` as in `move_to`."""
        for index, learner in enumerate(learners):
            assert learner.estimate is not None
            own = None if replaces else sent[index]
            pair_(learner.parameters, learner.estimate, sent[1 - index], self.alpha_tilde, own)


def move_to(
    mixed: Tensor, learners: Sequence[Learner], sent: Sequence[Tensor], ranges: Ranges, *, replaces: bool
) -> None:
    """Each learner's fragment moves by the difference between the group's and what it sent.

    Args:
        mixed: fp32 [n], the group's.
        sent: fp32 [n] of each.
        replaces: nothing was left out and nothing learned since, so that `mixed` takes the fragment's place.
    """
    for own, learner in zip(sent, learners, strict=True):
        local = take(learner.parameters, ranges)
        move_(local, mixed, own, replaces=replaces)
        if len(ranges) > 1:
            put(learner.parameters, ranges, local)


def put_off(learners: Sequence[Learner], change: Callable[[], None]) -> list[Moves]:
    """What `change` would add to the parameters of each learner, and to its second iterate; they stay as they are."""
    own = [learner.iterates for learner in learners]
    before = [[vector.clone() for vector in vectors] for vectors in own]
    change()
    moves = []
    for vectors, olds in zip(own, before, strict=True):
        moves.append(tuple(vector - old for vector, old in zip(vectors, olds, strict=True)))
        for vector, old in zip(vectors, olds, strict=True):
            vector.copy_(old)
    return moves


def average_moments(learners: Sequence[Learner], due: tuple[bool, bool]) -> None:
    """Give all the mean of their inner optimizers' first, and of their second moments, if these are due."""
    for kind, is_due in enumerate(due):
        for tensors in zip(*(learner.optimizer.moments[kind] for learner in learners), strict=True) if is_due else ():
            mean = torch.stack(tensors).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)
