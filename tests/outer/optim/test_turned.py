"""HeLoCo's outer step: when D is left, shortened or turned, and where peers start."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peer.outer.optim.optimizers import Vectors
from peer.outer.optim.turned import Turned

UP = torch.tensor([0.0, 2.0])


def moved(direction: Tensor, momentum: Tensor, optimizer: Turned | None = None) -> tuple[Tensor, Tensor]:
    """What D became, and the momentum after it."""
    optimizer = optimizer or Turned(lr=1.0, momentum=0.5)
    after = momentum.clone()
    optimizer.step_(torch.zeros_like(direction), [after], direction)
    return (after - 0.5 * momentum) / 0.5, after


@pytest.mark.parametrize("direction", [[1.0, 0.5], [0.0, 3.0]])
def test_what_agrees_with_the_momentum_is_left(direction: list[float]) -> None:
    torch.testing.assert_close(moved(torch.tensor(direction), UP)[0], torch.tensor(direction))
    assert torch.equal(moved(torch.tensor([1.0, -4.0]), torch.zeros(2))[0], torch.tensor([1.0, -4.0]))


def test_what_is_across_is_turned_and_keeps_its_length() -> None:
    direction = torch.tensor([3.0, 0.0])
    part = 3.0 / (3.0 + 3.0 * 2.0)  # the trust
    mixed = torch.tensor([1.0 - part, part])
    torch.testing.assert_close(moved(direction, UP)[0], 3.0 * mixed / mixed.norm())


def test_what_opposes_is_shortened_by_no_more_than_half() -> None:
    against = torch.tensor([0.0, -6.0])
    trust = 6.0 / (6.0 + 3.0 * 2.0)
    torch.testing.assert_close(moved(against, UP)[0], torch.tensor([0.0, -6.0 + 0.5 * trust * 6.0]))
    strict = Turned(lr=1.0, momentum=0.5, shrink=100.0)
    torch.testing.assert_close(moved(against, UP, strict)[0], torch.tensor([0.0, -3.0]))


def test_each_tensor_is_turned_by_itself() -> None:
    optimizer = Turned(lr=1.0, momentum=0.5).shaped([(2,), (1, 2)])
    both, momenta = torch.tensor([3.0, 0.0, 1.0, 0.5]), torch.cat([UP, UP])
    turned = moved(both, momenta, optimizer)[0]
    torch.testing.assert_close(turned[:2], moved(both[:2], UP)[0])
    torch.testing.assert_close(turned[2:], both[2:])


def test_peers_start_ahead_of_what_the_run_yields() -> None:
    optimizer, anchor, momentum = Turned(lr=0.7, momentum=0.9), torch.zeros(3), torch.zeros(3)
    theta, m = 0.0, 0.0
    for round in range(5):
        optimizer.step_(anchor, [momentum], torch.ones(3), round=round)
        m = 0.9 * m + 0.1
        theta -= 0.7 * (1.0 + 0.9 * m)
        torch.testing.assert_close(anchor, torch.full((3,), theta - 0.63 * m))
        torch.testing.assert_close(optimizer.result(anchor, [momentum], round + 1), torch.full((3,), theta))


def test_in_place_or_not_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    anchor, momentum, direction = (torch.randn(50, generator=generator) for _ in range(3))
    new = Vectors(torch.full_like(anchor, math.nan), [torch.full_like(anchor, math.nan)])
    optimizer = Turned(lr=0.7, momentum=0.9)
    optimizer.step(Vectors(anchor, [momentum]), direction, new)
    optimizer.step_(anchor, [momentum], direction)
    assert torch.equal(anchor, new.anchor)
    assert torch.equal(momentum, new.buffers[0])


@pytest.mark.parametrize("momentum", [[0.0, 1e-42], [0.0, -1e-42]])
def test_a_momentum_that_has_all_but_vanished_leaves_the_direction_finite(momentum: list[float]) -> None:
    direction = torch.tensor([3.0, 0.1])
    turned = moved(direction, torch.tensor(momentum))[0]
    assert torch.isfinite(turned).all()
    assert 2.9 < float(turned.norm()) < 3.1
