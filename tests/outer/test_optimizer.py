"""Outer optimizers against torch's, and in chunks against whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from peer.errors import UserError
from peer.outer.optimizer import Nesterov, OuterOptimizer, Sgd


def aggregate(step: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(step))


def test_nesterov_is_torch_sgd_with_nesterov_momentum_over_50_steps() -> None:
    anchor, buffer = torch.ones(1000), torch.zeros(1000)
    reference = torch.ones(1000)
    torch_sgd = torch.optim.SGD([reference], lr=0.07, momentum=0.9, nesterov=True)
    ours = Nesterov(lr=0.07, momentum=0.9)
    for step in range(50):
        reference.grad = 0.1 * aggregate(step, 1000)
        torch_sgd.step()
        ours.step_(anchor, [buffer], 0.1 * aggregate(step, 1000))
        torch.testing.assert_close(anchor, reference, rtol=0.0, atol=1e-6)


def test_sgd_by_hand_and_momentum_0_is_sgd() -> None:
    sgd_anchor, nesterov_anchor, buffer = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.zeros(2)
    Sgd(lr=0.5).step_(sgd_anchor, [], torch.tensor([2.0, -4.0]))
    Nesterov(lr=0.5, momentum=0.0).step_(nesterov_anchor, [buffer], torch.tensor([2.0, -4.0]))
    assert sgd_anchor.tolist() == nesterov_anchor.tolist() == [0.0, 4.0]


@pytest.mark.parametrize("optimizer", [Nesterov(lr=0.7, momentum=0.9), Sgd(lr=0.3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunked_equals_whole_bit_for_bit(optimizer: OuterOptimizer, threads: int) -> None:
    torch.set_num_threads(threads)
    numel, cuts = 100_003, [0, 1, 7, 4096, 50_001, 100_003]
    whole = [torch.ones(numel) for _ in range(1 + optimizer.num_buffers)]
    chunked = [tensor.clone() for tensor in whole]
    for step in range(10):
        direction = aggregate(step, numel)
        optimizer.step_(whole[0], whole[1:], direction)
        for a, b in itertools.pairwise(cuts):
            optimizer.step_(chunked[0][a:b], [buffer[a:b] for buffer in chunked[1:]], direction[a:b])
        assert torch.equal(direction, aggregate(step, numel))
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))


def test_each_operation_rounds_on_its_own() -> None:
    """A fused multiply-add would give another last bit; numpy's separate operations are the reference."""
    anchor, buffer = aggregate(1, 4099), aggregate(2, 4099)
    direction = aggregate(3, 4099)
    a, m, d = anchor.numpy().copy(), buffer.numpy().copy(), direction.numpy()
    lr, beta = torch.tensor(0.7).numpy(), torch.tensor(0.9).numpy()
    m = m * beta + d
    a = a - (m * beta + d) * lr
    Nesterov(lr=0.7, momentum=0.9).step_(anchor, [buffer], direction)
    assert (anchor.numpy() == a).all()
    assert (buffer.numpy() == m).all()


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_bad_learning_rates_are_refused(lr: float) -> None:
    with pytest.raises(UserError, match=r"outer_learning_rate=.*: must be finite and above 0"):
        Sgd(lr=lr)
    with pytest.raises(UserError, match="outer_learning_rate="):
        Nesterov(lr=lr, momentum=0.9)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, math.nan])
def test_bad_momenta_are_refused(momentum: float) -> None:
    with pytest.raises(UserError, match=r"outer_momentum=.*: must be in \[0, 1\)"):
        Nesterov(lr=0.7, momentum=momentum)
