"""What must hold between algorithms, whatever the problem: the list of invariants, each by its test.

| invariant | test |
|---|---|
| diloco (eta 1, beta 0, SGD inside) = fedavg | here: test_diloco_without_outer_momentum_is_fedavg |
| fedavg with H 1 and SGD = ddp; under AdamW it differs | here: test_fedavg_at_every_step_is_ddp_under_sgd_only |
| R 1, eta 1, beta 0, any H = the inner optimizer to 1 ulp | here: test_one_peer_alone_follows_its_inner_optimizer |
| fedprox mu 0 = fedavg | here: test_settings_that_switch_a_recipe_off_leave_fedavg |
| fedadam beta1 0, beta2 1, v0 1, tau 0 = SGD(eta) | here: the same; outer/test_optimizer.py: test_without_memory_... |
| fedglomo with server beta 1 = fedavg; its equation | here: the same; test_fedglomo_by_hand |
| easgd beta 1: c = mean; sum x_i + c conserved | here: test_easgd_conserves_the_sum_and_meets_in_the_mean |
| easgd alpha 0, papa alpha 1 = independent runs | here: test_settings_that_mean_no_communication |
| papa: the mean is always kept | here: test_papa_keeps_the_mean |
| streaming F 1, tau 0, alpha 0 = diloco | here: test_streaming_as_a_whole_is_diloco |
| streaming alpha 1 = independent locals | here: test_settings_that_mean_no_communication |
| each fragment once per H; bytes over H = diloco's | here: test_every_fragment_once_in_h_steps |
| a killed send leaves the anchor unchanged | test_life.py: test_a_killed_exchange_changes_nothing |
| eager: mean of D~ = D(t)/R + (1 - 1/R) D(t-H) | here: test_the_mean_of_eager_updates |
| eager R 1 = diloco, delay 0 = diloco | here: test_eager_without_peers_or_without_delay_is_diloco |
| noloco n = R and equal phi = heavy-ball diloco | test_gossip.py: test_noloco_in_one_group_is_heavy_ball_diloco |
| spread of phi -> 0 at a .5 with zero D, grows at .9 | test_gossip.py: test_the_spread_of_noloco_anchors |
| error feedback, decay 1: sent + residual = all of D | here: test_feedback_loses_nothing; compress/test_feedback.py |
| sparseloco, k = all, unquantised: residual 0 | here: test_sparseloco_that_sends_all_keeps_no_residual |
| demo: inverse DCT of DCT = identity | compress/test_dct.py: test_the_inverse_is_the_identity_to_one_in_a_million |
| demo: k = all -> sign of the mean gradient, any decay | here: test_demo_that_sends_all_steps_along_the_sign |
| demo: identical weights on all peers at every step | here: test_gradient_recipes_hold_identical_weights |
| selsync delta 0 = every step, infinity = warm-up only | here: test_selsync_at_its_ends |
| dropcompute tau infinity = ddp | here: test_settings_that_switch_a_recipe_off_leave_ddp |
| a2cid2 eta 0 = plain gossip in x, any a~ | test_gossip.py: test_a2cid2_without_eta_is_plain_gossip |
| a2cid2: mean of x conserved | test_gossip.py: test_gossip_conserves_the_mean |
| saps ratio 1 = pair averaging; identical masks | test_gossip.py: test_saps_averages_pairs_on_a_common_mask |
| dybw deadline infinity = plain averaging | test_gossip.py: test_dybw_that_waits_for_all_averages_all |
| mixing rows sum to 1 | outer/test_topology.py: test_metropolis_rows_sum_to_1_and_are_symmetric |
| dct-threshold at 0 = dense | here: test_settings_that_switch_a_recipe_off_leave_ddp |
| paba with equal peers = even split | here: test_settings_that_switch_a_recipe_off_leave_fedavg |
| RDA: R equal vectors; orthonormal -> norm 1 | outer/test_aggregate.py: test_equal_contributions_give_that_vector, |
| | test_orthonormal_vectors_average_to_norm_1 |
| async, equal speeds, quorum R = synchronous | here: test_a_quorum_of_all_is_synchronous |
| codecs: error bounds, wire bytes, same update bits | outer/compress/test_*.py; traffic: test_any_recipe.py; |
| | bits: test_production.py, outer/test_state.py |
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.outer.merging import Eager
from peer.outer.schedules import GradientChange
from peer.sim.replica import clip_
from peer.sim.scenario import PeerProfile
from peer.sim.simulate import Simulation
from tests.sim.tiny import (
    ADAMW,
    BATCH,
    SGD,
    StillTask,
    TinyTask,
    alone,
    close,
    commits_of,
    recipe_of,
    scatter,
    simulate,
    spread,
)

Overrides = dict[str, Any]


class SameBatchTask(TinyTask):
    """Every peer sees one batch for ever: its gradient has no noise."""

    def batches(self, peer: int) -> Any:
        """See `Task.batches`."""
        batch = next(super().batches(peer))
        while True:
            yield batch


def ulp(x: Tensor) -> Tensor:
    magnitude = x.abs()
    return torch.nextafter(magnitude, torch.full_like(x, torch.inf)) - magnitude


# diloco, fedavg, ddp ------------------------------------------------------------------------------------------------


def test_diloco_without_outer_momentum_is_fedavg() -> None:
    diloco = simulate("diloco", steps_per_round=5, outer_learning_rate=1.0, outer_momentum=0.0, inner=SGD)
    assert torch.equal(diloco.consensus, simulate("fedavg", steps_per_round=5, inner=SGD).consensus)


def test_fedavg_is_the_weighted_mean_of_the_local_parameters() -> None:
    run = simulate("fedavg", steps_per_round=5, steps=5, inner=SGD, peers=2)
    close(run.consensus, (alone(0, 5, SGD) + alone(1, 5, SGD)) / 2)
    speeds = (PeerProfile(speed=3.0), PeerProfile())
    run = simulate("fedavg", steps_per_round=8, steps=8, inner=SGD, profiles=speeds, allocator="time-balanced")
    assert [replica.steps for replica in run.simulation.replicas] == [12, 4]
    close(run.consensus, (3 * alone(0, 12, SGD) + alone(1, 4, SGD)) / 4)


def test_fedavg_at_every_step_is_ddp_under_sgd_only() -> None:
    close(simulate("fedavg", steps_per_round=1, inner=SGD).consensus, simulate("ddp", inner=SGD).consensus)
    apart = simulate("fedavg", steps_per_round=1).consensus - simulate("ddp").consensus
    assert apart.abs().max() > 1e-2


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("steps_per_round", [1, 4, 10])
@pytest.mark.parametrize("overrides", [{"outer_momentum": 0.0}, {"merge": "carry", "outer": "fedavg"}], ids=str)
def test_one_peer_alone_follows_its_inner_optimizer(overrides: Overrides, steps_per_round: int, inner: Any) -> None:
    run, commits = commits_of(
        "diloco", peers=1, steps=20, steps_per_round=steps_per_round, inner=inner,
        **{"outer_learning_rate": 1.0, **overrides},
    )
    anchors = [commit.anchors[0] for commit in commits[1:]] + [run.consensus]
    for commit, anchor in zip(commits, anchors, strict=True):
        local = commit.locals[0]
        assert ((anchor - local).abs() <= ulp(torch.maximum(commit.anchors[0].abs(), local.abs()))).all()
    close(run.consensus, alone(0, 20, inner), 3e-6)


@pytest.mark.parametrize("overlap_steps", [1, 3, 10])
def test_one_peer_alone_keeps_every_step_that_it_makes_while_it_sends(overlap_steps: int) -> None:
    schedule = {"name": "every", "steps": 10, "overlap_steps": overlap_steps}
    run = simulate("fedavg", peers=1, steps=35, schedule=schedule, merge="carry", inner=SGD)
    close(run.consensus, alone(0, 35, SGD), 3e-6)


def test_a_whole_round_of_overlap_carries_the_progress_of_everybody() -> None:
    schedule = {"name": "every", "steps": 5, "overlap_steps": 5}
    _, commits = commits_of("fedavg", steps=15, peers=2, schedule=schedule, merge="carry", inner=SGD)
    start = TinyTask().initial()
    first = sum((alone(peer, 5, SGD) - start for peer in range(2)), torch.zeros_like(start)) / 2
    second = sum((alone(peer, 10, SGD) - alone(peer, 5, SGD) for peer in range(2)), torch.zeros_like(start)) / 2
    close(commits[1].anchors[0], start + first)
    close(commits[2].anchors[0], start + first + second)


@pytest.mark.parametrize(
    ("name", "overrides", "against"),
    [
        ("fedprox", {"local": {"mu": 0.0}}, {}),
        ("fedadam", {"outer": {"lr": 0.5, "betas": (0.0, 1.0), "initial_v": 1.0, "tau": 0.0}},
         {"outer_learning_rate": 0.5}),
        ("fedyogi", {"outer": {"lr": 0.5, "betas": (0.0, 1.0), "initial_v": 1.0, "tau": 0.0}},
         {"outer_learning_rate": 0.5}),
        ("fedglomo", {"local": {"beta": 1.0}, "outer": {"momentum": 0.0}}, {}),
        ("paba", {}, {}),
        ("async-diloco", {"straggler": {"fraction": 1.0}, "outer": "fedavg"}, {}),
        ("easgd", {"merge": {"name": "mix", "alpha": 0.0}, "outer_learning_rate": 1.0}, {}),
        ("noloco", {"topology": "all", "outer": "fedavg"}, {}),
    ],
)
def test_settings_that_switch_a_recipe_off_leave_fedavg(name: str, overrides: Overrides, against: Overrides) -> None:
    task = SameBatchTask()
    run = simulate(name, steps=30, steps_per_round=5, inner=SGD, task=task, **overrides)
    assert torch.equal(run.consensus, simulate("fedavg", steps=30, steps_per_round=5, inner=SGD, task=task,
                                               **against).consensus)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("dropcompute", {"straggler": {"tau_s": 1e9}}),
        ("dropcompute", {"straggler": {"tau_s": 1e9, "normalise": "fixed"}}),
        ("dct-threshold", {"compressor": "threshold1+fp32"}),
        ("sparse-block", {"compressor": "randomblock1+fp32"}),
        ("fusionllm-adatopk", {"compressor": "top4096/4096+fp32", "allocator": {"base_ratio": 1.0}}),
    ],
)
def test_settings_that_switch_a_recipe_off_leave_ddp(name: str, overrides: Overrides) -> None:
    inner = ADAMW.model_copy(update={"max_grad_norm": 1e9})  # with error feedback each peer clips its own gradient
    assert torch.equal(simulate(name, inner=inner, **overrides).consensus, simulate("ddp", inner=inner).consensus)


@pytest.mark.parametrize("steps_per_round", [1, 6])
def test_a_quorum_of_all_is_synchronous(steps_per_round: int) -> None:
    run = simulate("async-diloco", straggler={"name": "quorum", "count": 4}, steps_per_round=steps_per_round)
    same = simulate("diloco", outer_learning_rate=0.07, steps_per_round=steps_per_round)
    assert torch.equal(run.consensus, same.consensus)


# fedglomo -----------------------------------------------------------------------------------------------------------


def test_fedglomo_by_hand() -> None:
    """u <- beta D_new + (1 - beta) (u + D_new - D_old), with full gradients, where the local momentum is plain."""
    task, beta, steps = SameBatchTask(), 0.3, 4
    run = simulate(
        "fedglomo", peers=2, steps=3 * steps, steps_per_round=steps, inner=SGD, task=task, local={"beta": beta},
        outer={"momentum": 1.0 - beta},
    )

    def progress(peer: int, anchor: Tensor) -> Tensor:
        local, gradient = anchor.clone(), torch.empty_like(anchor)
        for _ in range(steps):
            task.gradient(local, next(task.batches(peer)), gradient)
            local -= SGD.learning_rate * gradient
        return anchor - local

    anchor = task.initial()
    before, direction = anchor, torch.zeros_like(anchor)
    for _ in range(3):
        new, old = (sum((progress(p, at) for p in range(2)), torch.zeros_like(at)) / 2 for at in (anchor, before))
        direction = beta * new + (1 - beta) * (direction + new - old)
        before, anchor = anchor, anchor - direction
    close(run.consensus, anchor, 1e-5)


# easgd, papa --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "overrides"), [
    ("papa", {"merge": {"alpha": 1.0}}),
    ("easgd", {"merge": {"a": 0.0}}),
    ("streaming-diloco", {"merge": {"alpha": 1.0}, "steps_per_round": 10}),
])
def test_settings_that_mean_no_communication(name: str, overrides: Overrides) -> None:
    run = simulate(name, steps=40, **overrides)
    for peer, local in enumerate(run.locals):
        assert torch.equal(local, alone(peer, 40))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_easgd_conserves_the_sum_and_meets_in_the_mean(overlap_steps: int) -> None:
    schedule = {"name": "every", "steps": 4, "overlap_steps": overlap_steps}
    run, commits = commits_of(
        "easgd", steps=18, schedule=schedule, merge={"a": 0.25}, outer_learning_rate=1.0, inner=SGD
    )
    for commit, after in itertools.pairwise(commits):
        close(after.anchors[0], torch.stack(commit.locals).mean(0), 2e-6)
    still, commits = commits_of("easgd", steps=42, schedule=schedule, task=StillTask(), inner=SGD, prepare=scatter)
    first, last = commits[0], commits[-1]  # the last one closes the run: nobody merges it any more
    total = torch.stack([*first.locals, first.anchors[0]]).sum(0)
    close(torch.stack([*last.locals, last.anchors[0]]).sum(0), total, 1e-5)
    assert spread([*last.locals, last.anchors[0]]) < 0.1 * spread([*first.locals, first.anchors[0]])
    assert still.result.tally.committed == 11
    assert run.loss < 2.8


def test_papa_keeps_the_mean() -> None:
    run, commits = commits_of("papa", steps=40, task=StillTask(), inner=SGD, prepare=scatter)
    close(torch.stack(run.locals).mean(0), torch.stack(commits[0].locals).mean(0), 1e-5)
    # Four merges that shrink the distance to the mean by .99; the closing round only measures.
    assert spread(run.locals) / spread(commits[0].locals) == pytest.approx(0.99**4, rel=1e-4)


# streaming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_streaming_as_a_whole_is_diloco(codec: str) -> None:
    schedule = {"period": 6, "num_fragments": 1, "overlap_steps": 0}
    run = simulate("streaming-diloco", schedule=schedule, merge={"alpha": 0.0}, compressor=codec)
    diloco = simulate("diloco", steps_per_round=6, outer_learning_rate=0.4, compressor=codec)
    assert torch.equal(run.consensus, diloco.consensus)
    assert run.result.bytes_sent_per_peer == diloco.result.bytes_sent_per_peer


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_every_fragment_once_in_h_steps(num_fragments: int, overlap_steps: int) -> None:
    sent: list[list[int]] = [[] for _ in range(num_fragments)]
    schedule = {"period": 9, "num_fragments": num_fragments, "overlap_steps": overlap_steps}

    def watch(simulation: Simulation) -> None:
        replica = simulation.replicas[0]
        for fragment, tokens in enumerate(replica.unsent_tokens):
            steps = tokens // BATCH
            if steps == 1 and replica.steps > 1 and (not sent[fragment] or sent[fragment][-1] < replica.steps - 1):
                sent[fragment].append(replica.steps - 1)

    run = simulate("streaming-diloco", steps=54, schedule=schedule, compressor="fp32", watch=watch)
    for fragment, steps in enumerate(sent):
        offset = fragment * 9 // num_fragments
        assert steps == [step for step in range(1, 54) if step % 9 == offset]
    # Over whole periods the bytes are diloco's; the closing round sends what has come since once more.
    diloco = simulate("diloco", steps=54, steps_per_round=9).result.bytes_sent_per_peer
    closing = sum(run.simulation.sync.lengths[1:]) * 4 * 2 * 3 / 4
    assert run.result.bytes_sent_per_peer == pytest.approx(diloco + closing)


# eager --------------------------------------------------------------------------------------------------------------


def test_the_mean_of_eager_updates() -> None:
    merge, generator = Eager(), torch.Generator().manual_seed(0)
    now, before = (torch.randn(4, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    estimates = [merge.estimate(before.mean(0), now[m], before[m], 4) for m in range(4)]
    close(torch.stack(estimates).mean(0), now.mean(0) / 4 + 0.75 * before.mean(0), 1e-12)


def test_the_anchors_of_eager_peers_by_hand() -> None:
    """With SGD(1) outside: anchor_m(t) = anchor_m(t - H) - D~_m(t); at the first round D(t - H) is 0."""
    run = simulate("eager-diloco", peers=2, steps=15, steps_per_round=5, outer="fedavg", inner=SGD)
    task = TinyTask()
    batches, gradient = [task.batches(peer) for peer in range(2)], torch.empty(task.layout.numel)
    anchors, before = [task.initial(), task.initial()], [torch.zeros_like(gradient)] * 2
    for _ in range(3):
        now = []
        for peer, anchor in enumerate(anchors):
            local = anchor.clone()
            for _ in range(5):
                task.gradient(local, next(batches[peer]), gradient)
                local -= SGD.learning_rate * gradient
            now.append(anchor - local)
        delayed = (before[0] + before[1]) / 2
        anchors = [anchors[m] - (delayed + (now[m] - before[m]) / 2) for m in range(2)]
        before = now
    for replica, anchor in zip(run.simulation.replicas, anchors, strict=True):
        assert replica.learner is not None
        close(replica.learner.outer.anchor, anchor, 5e-6)


def test_eager_without_peers_or_without_delay_is_diloco() -> None:
    diloco = simulate("diloco", peers=1, steps=40, steps_per_round=10)
    close(simulate("eager-diloco", peers=1, steps=40, steps_per_round=10).locals[0], diloco.consensus, 1e-6)
    at_once = {"name": "every", "steps": 10, "overlap_steps": 0}
    run, same = simulate("eager-diloco", steps=40, schedule=at_once), simulate("diloco", steps=40, steps_per_round=10)
    assert torch.equal(run.consensus, same.consensus)


# sparse codecs and feedback -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["top8/64+fp32", "dct8+top8/64+int8", "threshold0.1+fp32", "randomblock0.1+int4"])
def test_feedback_loses_nothing(codec: str) -> None:
    """With decay 1, the anchor and the mean residual together have moved by all that was ever learned."""
    run, commits = commits_of(
        "sparseloco", steps=40, steps_per_round=5, compressor=codec, feedback={"decay": 1.0}, inner=SGD
    )
    learned = torch.zeros_like(run.consensus)
    for commit in commits:
        learned += torch.stack([a - x for a, x in zip(commit.anchors, commit.locals, strict=True)]).mean(0)
    learners = [replica.learner for replica in run.simulation.replicas if replica.learner is not None]
    residuals = [learner.encoders[0].residual for learner in learners]
    left = torch.stack([residual for residual in residuals if residual is not None]).mean(0)
    assert left.norm() > 1e-2
    close(TinyTask().initial() - run.consensus + left, learned, 1e-5)


def test_sparseloco_that_sends_all_keeps_no_residual() -> None:
    run = simulate("sparseloco", steps_per_round=5, compressor="top4096/4096+fp32", feedback={"decay": 0.95})
    for replica in run.simulation.replicas:
        assert replica.learner is not None
        residual = replica.learner.encoders[0].residual
        assert residual is not None
        assert not residual.any()
    assert torch.equal(run.consensus, simulate("fedavg", steps_per_round=5).consensus)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_demo_that_sends_all_steps_along_the_sign(decay: float) -> None:
    steps: list[tuple[Tensor, Tensor]] = []

    def watch(simulation: Simulation) -> None:
        learners = [replica.learner for replica in simulation.replicas if replica.learner is not None]
        if sum(replica.steps for replica in simulation.replicas) % len(learners) == 0:
            gradients = [learner.gradient.clone() for learner in learners]
            for gradient in gradients:
                clip_(gradient, ADAMW.max_grad_norm)
            steps.append((learners[0].parameters.clone(), torch.stack(gradients).mean(0)))

    run = simulate("demo", steps=15, compressor="dct64+top4096/4096+fp32", feedback={"decay": decay}, watch=watch)
    after = [before for before, _ in steps[1:]] + [run.consensus]
    for (before, gradient), moved in zip(steps, after, strict=True):
        clear = gradient.abs() > 1e-6  # the transform there and back is exact to 1e-6 of the block's norm
        assert clear.sum() > 0.9 * clear.numel()
        expected = before - ADAMW.learning_rate * gradient.sign()
        close(moved[clear], expected[clear], 1e-6)


@pytest.mark.parametrize(
    "name", ["ddp", "demo", "distro", "dropcompute", "dct-threshold", "sparse-block", "fusionllm-adatopk"]
)
def test_gradient_recipes_hold_identical_weights(name: str) -> None:
    seen = []

    def watch(simulation: Simulation) -> None:
        learners = [replica.learner for replica in simulation.replicas if replica.learner is not None]
        if sum(replica.steps for replica in simulation.replicas) % len(learners) == 0 and name != "distro":
            assert all(torch.equal(learner.parameters, learners[0].parameters) for learner in learners)
            seen.append(float(learners[0].parameters.norm()))

    run = simulate(name, steps=25, watch=watch)
    assert all(torch.equal(local, run.locals[0]) for local in run.locals)
    assert len(set(seen)) == len(seen)


# selsync ------------------------------------------------------------------------------------------------------------


def test_selsync_at_its_ends() -> None:
    often = simulate("selsync", steps=40, schedule={"delta": 0.0})
    assert often.result.tally.committed == 40
    close(often.consensus, simulate("fedavg", steps=40, steps_per_round=1).consensus, 2e-6)
    recipe = replace(recipe_of("selsync"), schedule=GradientChange(delta=math.inf))
    never = simulate(recipe, steps=40)
    assert never.result.tally.committed == 25 + 1  # the warm-up, and the closing round
    between = simulate("selsync", steps=40, schedule={"delta": 0.05}).result
    assert 26 < between.tally.committed < 40
    votes = 40 * 3
    assert never.result.bytes_sent_per_peer == 26 * 416 * 4 * 2 * 3 / 4 + (40 - 25) / 40 * votes


