"""Outer optimizers against torch's and against float64, and in chunks against whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from peer.errors import UserError
from peer.outer.optim.adaptive import Adagrad, Adam, Yogi
from peer.outer.optim.averaged import Averaged, PrimalAveraged
from peer.outer.optim.optimizers import (
    DelayedNesterov,
    HeavyBall,
    Nesterov,
    OuterOptimizer,
    Sgd,
    SignSgd,
    Vectors,
)
from peer.outer.recipe.registry import OUTER, parameters

ALL: list[OuterOptimizer] = [
    Sgd(lr=0.3),
    Nesterov(lr=0.7, momentum=0.9),
    HeavyBall(lr=0.7, momentum=0.5),
    SignSgd(lr=0.01, weight_decay=0.1),
    DelayedNesterov(lr=0.7, momentum=0.9, every=3),
    Adagrad(),
    Adam(),
    Yogi(),
]


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


def genesis(optimizer: OuterOptimizer, numel: int) -> list[torch.Tensor]:
    """Anchor of ones, then the buffers."""
    return [torch.full((numel,), value) for value in (1.0, *optimizer.initial_values)]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunked_equals_whole_bit_for_bit(optimizer: OuterOptimizer, threads: int) -> None:
    torch.set_num_threads(threads)
    numel, cuts = 100_003, [0, 1, 7, 4096, 50_001, 100_003]
    whole = genesis(optimizer, numel)
    chunked = [tensor.clone() for tensor in whole]
    for step in range(10):
        direction = aggregate(step, numel)
        optimizer.step_(whole[0], whole[1:], direction, round=step)
        for a, b in itertools.pairwise(cuts):
            optimizer.step_(chunked[0][a:b], [buffer[a:b] for buffer in chunked[1:]], direction[a:b], round=step)
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


Vector = NDArray[np.float64]


def written_out(optimizer: OuterOptimizer, directions: list[Vector]) -> Vector:
    """The papers' equations in float64, with FedOpt's Delta = -D, from an anchor of ones."""
    x = np.ones_like(directions[0])
    m, v, total = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    if isinstance(optimizer, Adagrad | Adam | Yogi):
        v += optimizer.tau**2
    for step, d in enumerate(directions):
        if isinstance(optimizer, Sgd):
            x = x - optimizer.lr * d
        elif isinstance(optimizer, Nesterov):
            m = optimizer.momentum * m + d
            x = x - optimizer.lr * (d + optimizer.momentum * m)
        elif isinstance(optimizer, HeavyBall):
            m = optimizer.momentum * m + d
            x = x - optimizer.lr * m
        elif isinstance(optimizer, SignSgd):
            x = x * (1 - optimizer.lr * optimizer.weight_decay) - optimizer.lr * np.sign(d)
        elif isinstance(optimizer, DelayedNesterov):
            total = total + d
            momentum_step = (step + 1) % optimizer.every == 0
            if momentum_step:
                m = optimizer.momentum * m + total / optimizer.every
                total = np.zeros_like(total)
            x = x - optimizer.lr * (optimizer.momentum * m * momentum_step + d / optimizer.every)
        elif isinstance(optimizer, Adagrad):
            v = v + d**2
            x = x + optimizer.lr * -d / (np.sqrt(v) + optimizer.tau)
        elif isinstance(optimizer, Adam | Yogi):
            (b1, b2), delta = optimizer.betas, -d
            m = b1 * m + (1 - b1) * delta
            if isinstance(optimizer, Adam):
                v = b2 * v + (1 - b2) * delta**2
            else:
                v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
            x = x + optimizer.lr * m / (np.sqrt(v) + optimizer.tau)
    return x


def plainly(optimizer: OuterOptimizer, old: list[torch.Tensor], d: torch.Tensor, round: int) -> list[torch.Tensor]:
    """The equations in fp32, an operation at a time in the order of the protocol: anchor, then buffers."""
    anchor, *buffers = old
    if isinstance(optimizer, Sgd):
        return [anchor - d * optimizer.lr]
    if isinstance(optimizer, SignSgd):
        return [anchor * (1.0 - optimizer.lr * optimizer.weight_decay) - d.sign() * optimizer.lr]
    if isinstance(optimizer, Nesterov):
        m = buffers[0] * optimizer.momentum + d
        return [anchor - (m * optimizer.momentum + d) * optimizer.lr, m]
    if isinstance(optimizer, HeavyBall):
        m = buffers[0] * optimizer.momentum + d
        return [anchor - m * optimizer.lr, m]
    if isinstance(optimizer, DelayedNesterov):
        m, total, share = buffers[0], buffers[1] + d, d / optimizer.every
        if (round + 1) % optimizer.every == 0:
            m = m * optimizer.momentum + total / optimizer.every
            total, share = torch.zeros_like(total), m * optimizer.momentum + share
        return [anchor - share * optimizer.lr, m, total]
    if isinstance(optimizer, PrimalAveraged):
        ahead, pull = buffers[-1], optimizer.interpolation
        z = anchor - ahead * pull
        new = plainly(optimizer.base, [z, *buffers[:-1]], d, round)
        ahead = (ahead + (z - new[0])) * optimizer.decay
        return [new[0] + ahead * pull, *new[1:], ahead]
    if isinstance(optimizer, Averaged):
        new = plainly(optimizer.base, old[:-1], d, round)
        return [*new, buffers[-1] * optimizer.decay + new[0] * (1.0 - optimizer.decay)]
    if isinstance(optimizer, Adagrad):
        v = buffers[0] + d * d
        return [anchor - d * optimizer.lr / (v.sqrt() + optimizer.tau), v]
    assert isinstance(optimizer, Adam | Yogi)
    (b1, b2), (m, v) = optimizer.betas, buffers
    m = m * b1 + d * (1.0 - b1)
    v = v * b2 + d * d * (1.0 - b2) if isinstance(optimizer, Adam) else v - (v - d * d).sign() * (d * d) * (1.0 - b2)
    return [anchor - m * optimizer.lr / (v.sqrt() + optimizer.tau), m, v]


AVERAGED = [Averaged(base=optimizer, decay=0.8) for optimizer in ALL]
PRIMAL = [PrimalAveraged(base=optimizer, decay=0.8, interpolation=0.7) for optimizer in ALL]


@pytest.mark.parametrize("optimizer", [*ALL, *AVERAGED, *PRIMAL], ids=repr)
def test_in_place_or_not_a_step_is_the_equations_bit_for_bit(optimizer: OuterOptimizer) -> None:
    old = genesis(optimizer, 5000)
    in_place = [tensor.clone() for tensor in old]
    for step in range(7):
        before, direction = [tensor.clone() for tensor in old], aggregate(step, 5000)
        new = [torch.full_like(tensor, math.nan) for tensor in old]
        optimizer.step(Vectors(old[0], old[1:]), direction, Vectors(new[0], new[1:]), round=step)
        optimizer.step_(in_place[0], in_place[1:], direction, round=step)
        expected = plainly(optimizer, before, direction, step)
        assert all(map(torch.equal, (*new, *in_place, *old), (*expected, *expected, *before)))
        assert torch.equal(direction, aggregate(step, 5000))
        old = new


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: type(optimizer).__name__)
def test_25_steps_agree_with_the_equations_in_float64(optimizer: OuterOptimizer) -> None:
    anchor, *buffers = genesis(optimizer, 1000)
    directions = [0.1 * aggregate(step, 1000) for step in range(25)]
    for step, direction in enumerate(directions):
        optimizer.step_(anchor, buffers, direction, round=step)
    expected = written_out(optimizer, [direction.double().numpy() for direction in directions])
    np.testing.assert_allclose(anchor.double().numpy(), expected, rtol=0.0, atol=1e-5)


def test_heavy_ball_is_torch_sgd_with_momentum() -> None:
    anchor, buffer, reference = torch.ones(1000), torch.zeros(1000), torch.ones(1000)
    torch_sgd = torch.optim.SGD([reference], lr=0.07, momentum=0.9)
    for step in range(50):
        reference.grad = 0.1 * aggregate(step, 1000)
        torch_sgd.step()
        HeavyBall(lr=0.07, momentum=0.9).step_(anchor, [buffer], 0.1 * aggregate(step, 1000))
        torch.testing.assert_close(anchor, reference, rtol=0.0, atol=1e-6)


def test_adagrad_is_torch_adagrad_with_the_same_start() -> None:
    anchor, v, reference = torch.ones(1000), torch.full((1000,), 0.25), torch.ones(1000)
    torch_adagrad = torch.optim.Adagrad([reference], lr=0.1, initial_accumulator_value=0.25, eps=1e-3)
    for step in range(20):
        reference.grad = aggregate(step, 1000)
        torch_adagrad.step()
        Adagrad(lr=0.1, tau=1e-3, initial_v=0.25).step_(anchor, [v], aggregate(step, 1000))
        torch.testing.assert_close(anchor, reference, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    "same_as_sgd",
    [
        Adam(lr=0.3, betas=(0.0, 1.0), initial_v=1.0, tau=0.0),
        Yogi(lr=0.3, betas=(0.0, 1.0), initial_v=1.0, tau=0.0),
        HeavyBall(lr=0.3, momentum=0.0),
        Nesterov(lr=0.3, momentum=0.0),
        DelayedNesterov(lr=0.3, momentum=0.0, every=1),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_without_memory_each_is_sgd_bit_for_bit(same_as_sgd: OuterOptimizer) -> None:
    anchor, *buffers = genesis(same_as_sgd, 5000)
    expected = torch.ones(5000)
    for step in range(10):
        same_as_sgd.step_(anchor, buffers, aggregate(step, 5000), round=step)
        Sgd(lr=0.3).step_(expected, [], aggregate(step, 5000))
        assert torch.equal(anchor, expected)


def test_yogi_shrinks_v_no_faster_than_it_grows() -> None:
    """Adam forgets a large D by a factor, Yogi by the square of what follows (the reason for the rule)."""
    adam, yogi = Adam(tau=1e-3, initial_v=1.0), Yogi(tau=1e-3, initial_v=1.0)
    adam_v, yogi_v = torch.ones(1), torch.ones(1)
    for _ in range(100):
        adam.step_(torch.zeros(1), [torch.zeros(1), adam_v], torch.full((1,), 0.01))
        yogi.step_(torch.zeros(1), [torch.zeros(1), yogi_v], torch.full((1,), 0.01))
    assert adam_v.item() == pytest.approx(0.99**100 + 1e-4 * (1 - 0.99**100), rel=1e-4)
    assert yogi_v.item() == pytest.approx(1 - 100 * 0.01 * 1e-4, rel=1e-4)


def test_sign_takes_equal_steps_and_decays_first() -> None:
    anchor = torch.tensor([1.0, -2.0, 4.0])
    SignSgd(lr=0.5, weight_decay=0.5).step_(anchor, [], torch.tensor([1e-30, -7.0, 0.0]))
    assert anchor.tolist() == [0.25, -1.0, 3.0]


def test_delayed_nesterov_every_step_is_nesterov_bit_for_bit() -> None:
    delayed, plain = DelayedNesterov(lr=0.7, momentum=0.9, every=1), Nesterov(lr=0.7, momentum=0.9)
    left, right = genesis(delayed, 5000), genesis(plain, 5000)
    for step in range(20):
        delayed.step_(left[0], left[1:], aggregate(step, 5000), round=step)
        plain.step_(right[0], right[1:], aggregate(step, 5000))
        assert torch.equal(left[0], right[0])


@given(every=st.integers(1, 6), momentum=st.floats(0.0, 0.95), windows=st.integers(1, 4))
def test_n_delayed_steps_are_one_nesterov_step_with_their_mean(every: int, momentum: float, windows: int) -> None:
    delayed, plain = DelayedNesterov(lr=0.7, momentum=momentum, every=every), Nesterov(lr=0.7, momentum=momentum)
    left, right = genesis(delayed, 16), genesis(plain, 16)
    for window in range(windows):
        steps = range(window * every, (window + 1) * every)
        for step in steps:
            delayed.step_(left[0], left[1:], aggregate(step, 16), round=step)
        plain.step_(right[0], right[1:], torch.stack([aggregate(step, 16) for step in steps]).mean(dim=0))
        torch.testing.assert_close(left[0], right[0], rtol=1e-5, atol=1e-4)
        assert not left[2].any()


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("lr_scale", [0.1, 0.5, 1.0])
def test_lr_scale_is_a_smaller_lr(optimizer: OuterOptimizer, lr_scale: float) -> None:
    lr: float = optimizer.lr  # type: ignore[attr-defined]
    smaller: OuterOptimizer = dataclasses.replace(optimizer, lr=lr * lr_scale)  # type: ignore[type-var]
    left, right = genesis(optimizer, 1000), genesis(optimizer, 1000)
    for step in range(4):
        optimizer.step_(left[0], left[1:], aggregate(step, 1000), round=step, lr_scale=lr_scale)
        smaller.step_(right[0], right[1:], aggregate(step, 1000), round=step)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: type(optimizer).__name__)
def test_lr_scale_0_leaves_the_anchor(optimizer: OuterOptimizer) -> None:
    anchor, *buffers = genesis(optimizer, 100)
    optimizer.step_(anchor, buffers, aggregate(0, 100), lr_scale=0.0)
    assert torch.equal(anchor, torch.ones(100))


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: type(optimizer).__name__)
def test_zero_aggregate_at_genesis_moves_nothing_but_decay(optimizer: OuterOptimizer) -> None:
    anchor, *buffers = genesis(optimizer, 10)
    optimizer.step_(anchor, buffers, torch.zeros(10))
    assert optimizer.num_buffers == len(buffers) == len(optimizer.initial_values)
    assert torch.equal(anchor, torch.full((10,), 1.0 - 0.001 if isinstance(optimizer, SignSgd) else 1.0))


def test_v_starts_at_tau_squared() -> None:
    assert Adagrad().initial_values == (1e-6,)
    assert Adam(tau=0.5).initial_values == Yogi(tau=0.5).initial_values == (0.0, 0.25)
    assert Adam(initial_v=0.0).initial_values == (0.0, 0.0)


def test_published_defaults() -> None:
    assert Adagrad() == Adagrad(lr=0.1, tau=1e-3, initial_v=None)
    assert Adam() == Adam(lr=0.1, betas=(0.9, 0.99), tau=1e-3, initial_v=None)
    assert Yogi() == Yogi(lr=0.01, betas=(0.9, 0.99), tau=1e-3, initial_v=None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeavyBall(lr=0.0, momentum=0.5), r"outer_learning_rate=0.0: must be finite and above 0"),
        (lambda: HeavyBall(lr=0.1, momentum=1.0), r"outer_momentum=1.0: must be in \[0, 1\)"),
        (lambda: SignSgd(lr=math.nan), r"outer_learning_rate=nan"),
        (lambda: SignSgd(lr=0.5, weight_decay=2.0), r"outer_weight_decay=2.0: must be in \[0, 1 / .* = 2\)"),
        (lambda: SignSgd(lr=0.5, weight_decay=-0.1), r"outer_weight_decay=-0.1"),
        (lambda: DelayedNesterov(lr=0.5, momentum=0.9, every=0), r"outer_every=0: must be at least 1"),
        (lambda: DelayedNesterov(lr=0.5, momentum=-1.0, every=2), r"outer_momentum=-1.0"),
        (lambda: Adagrad(lr=-1.0), r"outer_learning_rate=-1.0"),
        (lambda: Adagrad(tau=0.0), r"outer_tau=0.0: must be above 0"),
        (lambda: Adagrad(tau=math.inf), r"outer_tau=inf: must be finite and at least 0"),
        (lambda: Adam(betas=(1.0, 0.99)), r"outer_betas=\(1.0, 0.99\): the first must be in \[0, 1\)"),
        (lambda: Adam(betas=(0.9, 1.1)), r"outer_betas=\(0.9, 1.1\): the second must be in \[0, 1\]"),
        (lambda: Adam(tau=0.0, initial_v=1.0), r"outer_tau=0.0: must be above 0"),
        (lambda: Adam(tau=0.0, betas=(0.0, 1.0)), r"outer_tau=0.0: must be above 0"),
        (lambda: Yogi(tau=math.nan), r"outer_tau=nan"),
        (lambda: Yogi(initial_v=-1.0), r"outer_initial_v=-1.0: must be in \[0, 3.4e38\]"),
        (lambda: Yogi(initial_v=1e39), r"outer_initial_v=1e\+39"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], OuterOptimizer], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_the_registry_names_each_once() -> None:
    elementwise = ["sgd", "nesterov", "heavyball", "adagrad", "adam", "yogi", "sign", "delayed-nesterov"]
    assert list(OUTER) == [*elementwise, "turned"]
    assert {OUTER[name] for name in elementwise} == {type(optimizer) for optimizer in ALL}
    assert parameters(OUTER["sign"]) == {"lr": dataclasses.MISSING, "weight_decay": 0.0}
    assert parameters(OUTER["yogi"]) == {"lr": 0.01, "betas": (0.9, 0.99), "tau": 1e-3, "initial_v": None}
