"""Steps that stop at their time limit: what they learn from, what they weigh, and how the limit is chosen."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from peer.outer.policy.local_rules import Plain, Replay
from peer.outer.policy.straggler import ComputeTimeout
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.run.local_rule import hook_of
from peer.train.compute import Compute
from peer.train.compute_limit import TIMED_STEPS, ComputeLimit, micro_batch_of
from peer.train.hook import StepHook
from peer.train.optim import build_optimizer
from peer.train.step import Trainer
from tests.train.tiny import tiny_model

CPU = torch.device("cpu")


class Ticking:
    """A clock of which each micro-batch takes as long as its test says."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.seconds = 0.0, list(seconds)

    def __call__(self) -> float:
        return self.now

    def pass_one(self) -> None:
        self.now += self.seconds.pop(0)


def counted(limit: ComputeLimit, clock: Ticking, planned: int) -> int:
    """Micro-batches of one step."""
    limit.begin()
    count, goes_on = 0, True
    while goes_on and count < planned:
        clock.pass_one()
        count, goes_on = count + 1, limit.allows_another()
    limit.end()
    return count


@pytest.mark.parametrize(("tau_s", "count"), [(0.1, 1), (1.9, 1), (2.0, 2), (3.9, 3), (4.0, 4), (1e9, 4)])
def test_a_step_stops_before_the_micro_batch_that_would_end_too_late(tau_s: float, count: int) -> None:
    clock = Ticking(*[1.0] * 4)
    assert counted(ComputeLimit(ComputeTimeout(tau_s=tau_s), CPU, clock=clock), clock, 4) == count


def test_a_limit_is_of_all_passes_over_a_micro_batch() -> None:
    clock = Ticking(*[1.0] * 4)
    assert counted(ComputeLimit(ComputeTimeout(tau_s=8.0), CPU, 4, clock), clock, 4) == 2


def test_a_limit_is_chosen_from_measured_times_where_one_gains() -> None:
    chosen = []
    for slow in (1.0, 30.0):  # seconds of every 16th micro-batch
        clock = Ticking(*([1.0] * 15 + [slow]) * 100)
        limit = ComputeLimit(ComputeTimeout(tau_s=None), CPU, clock=clock)
        for _ in range(TIMED_STEPS + 1):
            assert limit.tau_s is None
            assert counted(limit, clock, 4) == 4
            clock.now += 0.5
        chosen.append(limit.tau_s)
    assert chosen == [float("inf"), 3.0]


def test_the_gradient_is_the_mean_over_what_was_computed_and_weighs_so_many_tokens() -> None:
    rows = torch.randint(3, 200, (6, 9), generator=torch.Generator().manual_seed(1))
    inner = InnerSpec(max_grad_norm=1e9)
    gradients = []
    for batch, limit in ((rows, ComputeLimit(ComputeTimeout(tau_s=1e-9), CPU)), (rows[:2], None)):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hook = StepHook()
        hook.limit = limit
        trainer = Trainer(model, optimizer, inner, lambda: 1.0, compute=Compute(micro_batch=2), hook=hook)
        result = trainer.step(batch)
        assert result.tokens == 16
        gradients.append([one - own.detach() for one, own in zip(before, model.parameters(), strict=True)])
        gradients[-1].append(torch.tensor(result.loss))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def step_of(batch: Tensor, limit: ComputeLimit | None, again: bool = False) -> tuple[Tensor, int]:
    """(how far a step moves the parameters, its tokens); with `again`, those of a second model that makes it, too."""
    model = tiny_model()
    layout, inner = FlatLayout.of(model), InnerSpec(optimizer="sgd", weight_decay=0.0, max_grad_norm=1e9)
    optimizer = build_optimizer(model, inner)
    rule = Replay(beta=0.5) if again else Plain()
    hook, second = hook_of(rule, model, layout, optimizer, inner, Compute(micro_batch=2))
    before, after = torch.empty(layout.numel), torch.empty(layout.numel)
    layout.copy_to_flat(model, before)
    hook.begin_round(before)
    hook.limit = limit
    trainer = Trainer(model, optimizer, inner, lambda: 1.0, compute=Compute(micro_batch=2), hook=hook)
    tokens = trainer.step(batch).tokens
    layout.copy_to_flat(model if second is None else second, after)
    return before - after, tokens


def test_with_a_fixed_number_what_was_dropped_counts_as_zeros() -> None:
    rows = torch.randint(3, 200, (6, 9), generator=torch.Generator().manual_seed(1))
    whole, _ = step_of(rows[:2], None)
    found, tokens = step_of(rows, ComputeLimit(ComputeTimeout(tau_s=1e-9, normalise="fixed"), CPU))
    assert tokens == 16
    torch.testing.assert_close(found, whole / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalise", ["computed", "fixed"])
def test_a_rule_that_replays_steps_replays_what_was_computed_in_time(normalise: Literal["computed", "fixed"]) -> None:
    rows = torch.randint(3, 200, (6, 9), generator=torch.Generator().manual_seed(1))
    limit = ComputeLimit(ComputeTimeout(tau_s=1e-9, normalise=normalise), CPU)
    whole, _ = step_of(rows[:2], None, again=True)
    found, tokens = step_of(rows, limit, again=True)
    assert tokens == 16
    torch.testing.assert_close(found, whole / (3 if normalise == "fixed" else 1), rtol=1e-4, atol=1e-6)


def test_a_step_is_cut_so_that_something_can_be_dropped() -> None:
    assert [micro_batch_of(ComputeTimeout(tau_s=1.0), count) for count in (64, 8, 3)] == [8, 1, 1]
    assert micro_batch_of(None, 64) == 64
