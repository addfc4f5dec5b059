"""What must hold between algorithms, whatever the problem."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.outer.optimizer import Nesterov
from peer.outer.recipes import Recipe, resolve
from peer.protocol.manifest import RecipeSpec
from tests.outer.simulation import InnerLoop, MakeInner, Swarm, gradient, start

NUMEL = 24


def recipe(name: str, **overrides: float) -> Recipe:
    return resolve(RecipeSpec.model_validate({"name": name, **overrides}))


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def ulp(x: Tensor) -> Tensor:
    magnitude = x.abs()
    return torch.nextafter(magnitude, torch.full_like(x, torch.inf)) - magnitude


def mean_of_locals(peers: int, rounds: int, steps: int, weights: list[float]) -> Tensor:
    """Federated averaging written out: average the parameters, not the pseudo-gradients, in float64."""
    loops = [InnerLoop(peer, NUMEL, sgd) for peer in range(peers)]
    for _ in range(rounds):
        for loop in loops:
            loop.run(steps)
        mean = sum(w * loop.local.double() for w, loop in zip(weights, loops, strict=True)) / sum(weights)
        assert isinstance(mean, Tensor)
        for loop in loops:
            loop.local.copy_(mean)
    return loops[0].local


def data_parallel(make_inner: MakeInner, peers: int, steps: int) -> Tensor:
    """One set of parameters, the mean gradient of all peers at every step."""
    x = start(NUMEL)
    optimizer = make_inner([x])
    for step in range(steps):
        x.grad = torch.stack([gradient(x, peer, step) for peer in range(peers)]).mean(dim=0)
        optimizer.step()
    return x


def test_diloco_with_lr_1_and_no_momentum_is_fedavg_bit_for_bit() -> None:
    diloco = recipe("diloco", steps_per_round=5, outer_learning_rate=1.0, outer_momentum=0.0)
    assert diloco.outer == Nesterov(lr=1.0, momentum=0.0)
    weights = [3.0, 1.0, 2.0]
    left = Swarm(diloco, sgd, peers=3, numel=NUMEL, weights=weights)
    right = Swarm(recipe("fedavg", steps_per_round=5), sgd, peers=3, numel=NUMEL, weights=weights)
    for _ in range(8):
        left.round()
        right.round()
        assert torch.equal(left.anchor, right.anchor)


def test_fedavg_is_the_weighted_mean_of_the_local_parameters() -> None:
    weights = [3.0, 1.0, 2.0]
    swarm = Swarm(recipe("fedavg", steps_per_round=5), sgd, peers=3, numel=NUMEL, weights=weights)
    for _ in range(8):
        swarm.round()
    torch.testing.assert_close(swarm.anchor, mean_of_locals(3, 8, 5, weights), rtol=0.0, atol=1e-6)


def test_fedavg_every_step_under_sgd_is_data_parallel_training() -> None:
    swarm = Swarm(recipe("fedavg", steps_per_round=1), sgd, peers=4, numel=NUMEL)
    for _ in range(30):
        swarm.round()
    torch.testing.assert_close(swarm.anchor, data_parallel(sgd, 4, 30), rtol=0.0, atol=1e-6)


def test_fedavg_every_step_under_adamw_is_not_data_parallel_training() -> None:
    swarm = Swarm(recipe("fedavg", steps_per_round=1), adamw, peers=4, numel=NUMEL)
    for _ in range(30):
        swarm.round()
    assert (swarm.anchor - data_parallel(adamw, 4, 30)).abs().max() > 1e-3


@pytest.mark.parametrize("make_inner", [sgd, adamw])
@pytest.mark.parametrize("steps_per_round", [1, 3, 10])
@pytest.mark.parametrize("name", ["diloco", "fedavg"])
def test_one_peer_alone_follows_its_inner_optimizer_to_1_ulp(
    name: str, steps_per_round: int, make_inner: MakeInner
) -> None:
    overrides = {"outer_momentum": 0.0} if name == "diloco" else {}
    alone = recipe(name, steps_per_round=steps_per_round, outer_learning_rate=1.0, **overrides)
    swarm = Swarm(alone, make_inner, peers=1, numel=NUMEL)
    for _ in range(30 // steps_per_round):
        inner = swarm.loops[0]
        before = swarm.anchor.clone()
        inner.run(steps_per_round)
        expected = inner.local.clone()
        update = swarm.exchange()
        swarm.states[0].apply(update, 1, "")
        assert ((swarm.anchor - expected).abs() <= ulp(torch.maximum(before.abs(), expected.abs()))).all()
        inner.local.copy_(swarm.anchor)
    only_inner = InnerLoop(0, NUMEL, make_inner)
    only_inner.run(30)
    torch.testing.assert_close(swarm.anchor, only_inner.local, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("name", ["diloco", "opendiloco", "fedavg"])
def test_all_peers_hold_the_same_bits_for_20_rounds(name: str) -> None:
    swarm = Swarm(recipe(name, steps_per_round=2), adamw, peers=4, numel=1111, weights=[1.0, 2.0, 3.0, 4.0])
    seen = set()
    for _ in range(20):
        swarm.round()
        digests = {state.digest() for state in swarm.states}
        assert len(digests) == 1
        seen |= digests
    assert len(seen) == 20
    assert [state.round for state in swarm.states] == [20] * 4


def test_int8_ends_near_fp32() -> None:
    ends = []
    for codec in ("fp32", "int8"):
        spec = RecipeSpec.model_validate({"name": "diloco", "steps_per_round": 5, "compressor": codec})
        swarm = Swarm(resolve(spec), adamw, peers=4, numel=1111)
        for _ in range(20):
            swarm.round()
        ends.append(swarm.anchor.clone())
    error = (ends[0] - ends[1]).norm() / (ends[0] - start(1111)).norm()
    assert 0.0 < error < 0.01


def test_an_aborted_round_loses_no_work() -> None:
    """The pseudo-gradient is measured against the anchor: one round of 2 H steps carries what two rounds would."""
    swarm = Swarm(recipe("fedavg", steps_per_round=4), sgd, peers=2, numel=NUMEL)
    for loop in swarm.loops:
        loop.run(4)
    swarm.exchange()  # made, sent, and then nobody signed
    swarm.round()
    torch.testing.assert_close(swarm.anchor, mean_of_locals(2, 1, 8, [1.0, 1.0]), rtol=0.0, atol=1e-6)
