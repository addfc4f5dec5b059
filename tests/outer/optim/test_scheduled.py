"""Outer optimizers in stages: what changes in which round, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peer.outer.optim.adaptive import Adam
from peer.outer.optim.optimizers import Descent, HeavyBall, Nesterov
from peer.outer.optim.scheduled import Scheduled, Stages
from peer.outer.recipe.published import RECIPES

BASE = Nesterov(lr=1.0, momentum=0.9)


def rounds_of(stages: Stages, rounds: int, base: Descent = BASE) -> list[Descent]:
    """The optimizer of every round of a run."""
    stages = replace(stages, rounds=rounds)
    return [stages.at(base, round) for round in range(rounds)]


def test_the_stages_of_pier_in_twenty_rounds() -> None:
    pier = RECIPES["pier"]
    assert pier.outer_schedule is not None
    assert isinstance(pier.outer, Nesterov)
    stages = replace(pier.outer_schedule, rounds=20)
    assert [round + 1 for round in range(20) if stages.is_lazy(round)] == [1, 2]
    seen = rounds_of(stages, 20, pier.outer)
    assert [now.lr for now in seen[2:]] == pytest.approx([0.55, *[1.1] * 13, *[0.9] * 4])
    momenta = [now.momentum for now in seen if isinstance(now, Nesterov)]
    assert momenta == [0.9, 0.9, 0.99, 0.95, *[0.9] * 16]


def test_a_rate_that_falls_in_a_line_stays_at_its_end() -> None:
    falls = Stages(decay_from=0.25, decay_until=0.75, final_lr=0.2)
    assert [now.lr for now in rounds_of(falls, 8)] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert [now.lr for now in rounds_of(Stages(warmup=0.5), 4)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert rounds_of(Stages(restart=3), 8) == [BASE] * 8


def test_a_restart_forgets_momentum_and_moments_and_nothing_else() -> None:
    for base in (BASE, HeavyBall(lr=0.5, momentum=0.8), Adam(lr=0.1)):
        scheduled = Scheduled(base=base, stages=Stages(restart=2))
        states = [[torch.ones(9), *(torch.full((9,), value) for value in base.initial_values)] for _ in range(2)]
        for round in range(6):
            direction = torch.randn(9, generator=torch.Generator().manual_seed(round))
            for (anchor, *buffers), optimizer in zip(states, (scheduled, base), strict=True):
                if optimizer is base and round in (2, 4):
                    for buffer, value in zip(buffers, base.initial_values, strict=True):
                        buffer.fill_(value)
                optimizer.step_(anchor, buffers, direction, round=round)
            assert all(map(torch.equal, *states))


def test_a_lazy_round_takes_the_mean_and_gathers_momentum() -> None:
    scheduled = Scheduled(base=BASE, stages=Stages(lazy=0.5, rounds=4))
    anchor, momentum = torch.zeros(3), torch.zeros(3)
    for round in range(2):
        scheduled.step_(anchor, [momentum], torch.ones(3), round=round)
    assert torch.equal(anchor, torch.full((3,), -2.0))
    assert torch.equal(momentum, torch.full((3,), 0.9) + 1.0)
    scheduled.step_(anchor, [momentum], torch.ones(3), round=2)
    torch.testing.assert_close(anchor, torch.full((3,), -3.0 - 0.9 * 2.71))
