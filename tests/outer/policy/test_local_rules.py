"""Local rules and merge rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.policy import local_rules as local_module
from peer.outer.policy import merge_rules
from peer.outer.policy.local_rules import LocalRule, Plain, Proximal, Spider
from peer.outer.policy.merge_rules import Carry, Elastic, MergeRule, Mix
from peer.outer.state.carry import carry_progress_


def vectors(count: int, numel: int = 1001) -> list[Tensor]:
    return list(torch.randn(count, numel, generator=torch.Generator().manual_seed(0)).unbind())


def bits(x: Tensor) -> list[int]:
    return [int(value) for value in x.view(torch.int32)]


@pytest.mark.parametrize("rule", [Plain(), Proximal(mu=0.0), Proximal(mu=0.0, decoupled=True)], ids=repr)
def test_plain_and_mu_0_change_nothing_bit_for_bit(rule: LocalRule) -> None:
    gradient, local, anchor = vectors(3)
    gradient[:2] = torch.tensor([-0.0, 1e-45])
    before = [gradient.clone(), local.clone(), anchor.clone()]
    rule.begin_round()
    rule.on_gradient(gradient, local, anchor)
    rule.after_step(local, anchor, 0.1)
    for after, kept in zip((gradient, local, anchor), before, strict=True):
        assert bits(after) == bits(kept)
    assert not rule.replays


def test_the_proximal_pull_is_the_gradient_of_its_penalty() -> None:
    gradient, local, anchor = (x.double().requires_grad_() for x in vectors(3))
    (0.5 * 0.3 * (local - anchor).square().sum()).backward()
    pulled = gradient.detach().clone()
    Proximal(mu=0.3).on_gradient(pulled, local.detach(), anchor.detach())
    torch.testing.assert_close(pulled - gradient.detach(), local.grad, rtol=1e-12, atol=1e-15)


def test_the_decoupled_pull_leaves_the_gradient_and_shrinks_the_distance() -> None:
    gradient, local, anchor = vectors(3)
    before = gradient.clone()
    rule = Proximal(mu=0.5, decoupled=True)
    rule.on_gradient(gradient, local, anchor)
    assert torch.equal(gradient, before)
    distance = local - anchor
    rule.after_step(local, anchor, lr=0.2)
    torch.testing.assert_close(local - anchor, 0.9 * distance, rtol=1e-5, atol=1e-6)
    coupled = local.clone()
    Proximal(mu=0.5).after_step(coupled, anchor, lr=0.2)
    assert torch.equal(coupled, local)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        gradient, local, anchor, new = vectors(4)
        Proximal(mu=0.3).on_gradient(gradient, local, anchor)
        Proximal(mu=0.3, decoupled=True).after_step(local, anchor, 0.1)
        mixed, pulled = local.clone(), local.clone()
        Mix(alpha=0.3).merge_(mixed, None, anchor, new)
        Elastic(a=0.2).merge_(pulled, gradient, anchor, new)
        return [gradient, local, mixed, pulled]

    whole = run()
    monkeypatch.setattr(local_module, "CHUNK", 100)
    monkeypatch.setattr(merge_rules, "CHUNK", 100)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))


def gradient_of(w: Tensor, noise: float) -> Tensor:
    return 2.0 * w + noise * w.square() + 10.0 * noise


def test_spider_follows_its_equation_on_the_same_batch() -> None:
    rule = Spider()
    anchor, points, noises = torch.zeros(2), [1.0, 0.5, 0.25], [0.1, -0.3, 0.2]
    estimate = 0.0
    for k, (point, noise) in enumerate(zip(points, noises, strict=True)):
        local = torch.full((2,), point)
        gradient = gradient_of(local, noise)
        rule.on_gradient(gradient, local, anchor, lambda w, noise=noise: gradient_of(w, noise))
        if k == 0:
            estimate = float(gradient_of(local, noise)[0])
        else:
            earlier = torch.full((1,), points[k - 1])
            estimate = float(gradient_of(local, noise)[0]) + estimate - float(gradient_of(earlier, noise)[0])
        assert gradient.tolist() == pytest.approx([estimate] * 2, rel=1e-6)
        local.zero_()  # the rule must have kept a copy
    assert rule.replays


def test_spider_keeps_the_noise_of_its_first_batch_alone_and_starts_anew_each_round() -> None:
    # Additive noise cancels in g(w_k) - g(w_{k-1}): v_k is the true gradient plus the first batch's noise.
    rule, anchor = Spider(), torch.zeros(1)
    for round in range(2):
        rule.begin_round()
        for step, noise in enumerate([3.0, -8.0, 5.0]):
            local = torch.tensor([4.0 - step + round])
            gradient = local + noise
            rule.on_gradient(gradient, local, anchor, lambda w, noise=noise: w + noise)
            assert gradient.item() == pytest.approx(local.item() + 3.0)


def test_without_noise_spider_is_plain() -> None:
    rule, anchor = Spider(), torch.zeros(3)
    for step in range(5):
        local = torch.tensor([1.0, 2.0, 4.0]) * 2.0**-step
        gradient = 2.0 * local
        rule.on_gradient(gradient, local, anchor, lambda w: 2.0 * w)
        rule.after_step(local, anchor, 0.1)
        assert torch.equal(gradient, 2.0 * local)


def test_spider_says_what_it_needs() -> None:
    with pytest.raises(AssertionError, match="needs gradient_at"):
        Spider().on_gradient(torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_mix_takes_the_anchor_keeps_the_local_or_goes_between() -> None:
    local, base, old, new = vectors(4)
    new[:2] = torch.tensor([-0.0, 1e-45])
    taken, kept, between = local.clone(), local.clone(), local.clone()
    Mix(alpha=0.0).merge_(taken, base, old, new)
    assert bits(taken) == bits(new)
    Mix(alpha=1.0).merge_(kept, base, old, new)
    assert bits(kept) == bits(local)
    Mix(alpha=0.25).merge_(between, base, old, new)
    assert torch.equal(between, local * 0.25 + new * 0.75)


def test_the_population_mean_is_kept_by_mixing() -> None:
    population = [x.double() for x in vectors(5)]
    mean = torch.stack(population).mean(0)
    for x in population:
        Mix(alpha=0.99).merge_(x, None, mean, mean)
    torch.testing.assert_close(torch.stack(population).mean(0), mean, rtol=1e-12, atol=1e-14)


def test_carry_is_merge_and_without_steps_the_anchor() -> None:
    local, base, old, new = vectors(4)
    carried, expected = local.clone(), local.clone()
    Carry().merge_(carried, base, old, new)
    carry_progress_(expected, base, new)
    assert bits(carried) == bits(expected)
    Carry().merge_(local, None, old, new)
    assert bits(local) == bits(new)


def elastic_round(locals_: list[Tensor], centre: Tensor, a: float, progress: float = 0.0) -> Tensor:
    snapshots = [x.clone() for x in locals_]
    new = centre + a * sum(x - centre for x in snapshots)
    for x, snapshot in zip(locals_, snapshots, strict=True):
        x.add_(progress)
        Elastic(a=a).merge_(x, snapshot if progress else None, centre, new)
    return new


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_elastic_rounds_conserve_the_sum_and_beta_1_gives_the_mean(progress: float) -> None:
    locals_, centre = [x.double() for x in vectors(4, 50)], torch.ones(50, dtype=torch.float64)
    total, mean = torch.stack([*locals_, centre]).sum(0), torch.stack(locals_).mean(0)
    centre = elastic_round(locals_, centre, 0.25, progress)
    torch.testing.assert_close(centre, mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.stack([*locals_, centre]).sum(0), total + 4 * progress, rtol=1e-12, atol=1e-14)


def test_elastic_0_means_independent_runs() -> None:
    locals_, centre = vectors(2), torch.ones(1001)
    before = [x.clone() for x in locals_]
    assert torch.equal(elastic_round(locals_, centre, 0.0), centre)
    assert all(bits(x) == bits(y) for x, y in zip(locals_, before, strict=True))


@pytest.mark.parametrize("rule", [Mix(alpha=0.5), Carry(), Elastic(a=0.5)], ids=repr)
@pytest.mark.parametrize("stepped", [True, False])
def test_merging_changes_the_local_parameters_alone(rule: MergeRule, stepped: bool) -> None:
    local, base, old, new = vectors(4)
    before = [base.clone(), old.clone(), new.clone()]
    rule.merge_(local, base if stepped else None, old, new)
    assert all(torch.equal(x, y) for x, y in zip((base, old, new), before, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Proximal(mu=-1.0), "mu=-1.0: must be finite and at least 0"),
        (lambda: Mix(alpha=1.5), r"alpha=1.5: must be in \[0, 1\]"),
        (lambda: Elastic(a=float("nan")), r"a=nan: must be in \[0, 1\]"),
    ],
)
def test_what_cannot_work_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=message) as error:
        make()
    assert error.value.hint
