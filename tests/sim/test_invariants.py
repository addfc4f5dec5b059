"""What must hold between algorithms, whatever the problem: the list of invariants, each by its test.

| invariant | test |
|---|---|
| diloco (eta 1, beta 0, SGD inside) = fedavg | here: test_diloco_without_outer_momentum_is_fedavg |
| fedavg with H 1 and SGD = ddp; under AdamW it differs | here: test_fedavg_at_every_step_is_ddp_under_sgd_only |
| R 1, eta 1, beta 0, any H = the inner optimizer to 1 ulp | here: test_one_peer_alone_follows_its_inner_optimizer |
| des-loc under SGD, or that never averages a moment = fedavg | here: the same; test_moments_are_averaged_... |
| fedprox mu 0 = fedavg | here: test_settings_that_switch_a_recipe_off_leave_fedavg |
| fedadam beta1 0, beta2 1, v0 1, tau 0 = SGD(eta) | here: the same; outer/test_optimizer.py: test_without_memory_... |
| pier, lazy all the time = fedavg; restarts at every round = SGD | here: the same; test_a_restart_at_every_round_... |
| heloco that never turns, beta 0 = SGD | here: test_settings_that_switch_a_recipe_off_leave_fedavg |
| sparta of all coordinates = papa alpha 0 | here: test_sparta_of_everything_averages_everything |
| palsgd p 0 = diloco; edit, hot and unclipped = diloco | here: test_settings_that_switch_a_recipe_off_leave_diloco |
| fedglomo with server beta 1 = fedavg; its equation | here: the same; test_fedglomo_by_hand |
| easgd beta 1: c = mean; sum x_i + c conserved | test_merges.py: test_easgd_conserves_the_sum_and_meets_in_the_mean |
| easgd alpha 0, papa alpha 1 = independent runs | test_merges.py: test_settings_that_mean_no_communication |
| papa: the mean is always kept | test_merges.py: test_papa_keeps_the_mean |
| streaming F 1, tau 0, alpha 0 = diloco | test_merges.py: test_streaming_as_a_whole_is_diloco |
| streaming alpha 1 = independent locals | test_merges.py: test_settings_that_mean_no_communication |
| each fragment once per H; bytes over H = diloco's | test_merges.py: test_every_fragment_once_in_h_steps |
| a killed send leaves the anchor unchanged | test_life.py: test_a_killed_exchange_changes_nothing |
| eager: mean of D~ = D(t)/R + (1 - 1/R) D(t-H) | test_merges.py: test_the_anchors_of_eager_peers_by_hand |
| eager R 1 = diloco | test_merges.py: test_eager_without_peers_is_diloco |
| noloco n = R and equal phi = heavy-ball diloco | test_gossip.py: test_noloco_in_one_group_is_heavy_ball_diloco |
| spread of phi -> 0 at a .5 with zero D, grows at .9 | test_gossip.py: test_the_spread_of_noloco_anchors |
| error feedback, decay 1: sent + residual = all of D | test_sparse.py: test_feedback_loses_nothing, |
| | compress/test_feedback.py |
| sparseloco, k = all, unquantised: residual 0 | test_sparse.py: test_sparseloco_that_sends_all_keeps_no_residual |
| demo: inverse DCT of DCT = identity | compress/test_dct.py: test_the_inverse_is_the_identity_to_one_in_a_million |
| demo: k = all -> sign of the mean gradient | test_sparse.py: test_demo_that_sends_all_steps_along_the_sign |
| demo: identical weights on all peers at every step | here: test_gradient_recipes_hold_identical_weights |
| selsync delta 0 = every step, infinity = warm-up only | test_sparse.py: test_selsync_at_its_ends |
| dropcompute tau infinity = ddp | here: test_settings_that_switch_a_recipe_off_leave_ddp |
| a2cid2 eta 0 = plain gossip in x, any a~ | test_gossip.py: test_a2cid2_without_eta_is_plain_gossip |
| a2cid2: mean of x conserved | test_gossip.py: test_gossip_conserves_the_mean |
| saps ratio 1 = pair averaging; identical masks | test_gossip.py: test_saps_averages_pairs_on_a_common_mask |
| dybw deadline infinity = plain averaging | test_gossip.py: test_dybw_that_waits_for_all_averages_all |
| dct-threshold at 0 = dense | here: test_settings_that_switch_a_recipe_off_leave_ddp |
| paba with equal peers = even split | here: test_settings_that_switch_a_recipe_off_leave_fedavg |
| RDA: R equal vectors; orthonormal -> norm 1 | outer/test_aggregate.py: test_equal_contributions_give_that_vector, |
| | test_orthonormal_vectors_average_to_norm_1 |
| async, equal speeds, quorum R = synchronous | here: test_a_quorum_of_all_is_synchronous |
| codecs: error bounds, wire bytes, same update bits | outer/compress/test_*.py; traffic: test_any_recipe.py; |
| | bits: test_production.py, outer/test_state.py |
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peer.sim.campaign.simulation import Simulation
from peer.sim.world.scenario import PeerProfile
from tests.sim.tiny import ADAMW, SGD, alone, close, commits_of, simulate
from tests.sim.tiny_task import TinyTask

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
        ("des-loc", {}, {}),
        ("fedadam", {"outer": {"lr": 0.5, "betas": (0.0, 1.0), "initial_v": 1.0, "tau": 0.0}},
         {"outer_learning_rate": 0.5}),
        ("fedyogi", {"outer": {"lr": 0.5, "betas": (0.0, 1.0), "initial_v": 1.0, "tau": 0.0}},
         {"outer_learning_rate": 0.5}),
        ("fedglomo", {"local": {"beta": 1.0}, "outer": {"momentum": 0.0}}, {}),
        ("paba", {}, {}),
        ("pier", {"outer_schedule": {"lazy": 1.0}}, {}),
        ("heloco", {"outer": {"lr": 0.5, "momentum": 0.0, "enough": 0.0, "shrink": 0.0}, "straggler": "wait"},
         {"outer_learning_rate": 0.5}),
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


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("palsgd", {"local": {"p": 0.0}}),
        ("edit", {"aggregator": {"temperature": 1e30, "max_norm": 1e9, "threshold": 1e9}}),
        ("pier", {"outer_schedule": "none"}),
        ("snoo", {}),
        ("restarted-diloco", {"outer_schedule": {"restart": 100}}),
    ],
)
def test_settings_that_switch_a_recipe_off_leave_diloco(name: str, overrides: Overrides) -> None:
    outer = {"outer_learning_rate": 0.3, "outer_momentum": 0.5, "steps_per_round": 5}
    run = simulate(name, **outer, **overrides)
    assert torch.equal(run.consensus, simulate("diloco", **outer).consensus)


@pytest.mark.parametrize("third", ["first", "second"])
def test_moments_are_averaged_in_their_rounds_and_no_others(third: str) -> None:
    run = simulate("des-loc", steps=15, steps_per_round=5, moments={"first": 2, "second": 2} | {third: 3})
    learners = [replica.learner for replica in run.simulation.replicas if replica.learner is not None]
    for kind, name in enumerate(("first", "second")):
        moments = [learner.optimizer.moments[kind][0] for learner in learners]
        assert torch.equal(moments[0], moments[1]) == (name == third)
    alike = simulate("des-loc", steps=15, steps_per_round=5, moments={"first": 0, "second": 0}).consensus
    assert torch.equal(alike, simulate("fedavg", steps=15, steps_per_round=5).consensus)


def test_sparta_of_everything_averages_everything() -> None:
    run = simulate("sparta", steps_per_round=5, compressor="random1+fp32")
    papa = simulate("papa", steps_per_round=5, merge={"name": "mix", "alpha": 0.0})
    close(run.consensus, papa.consensus)
    for local in run.locals:
        close(local, run.locals[0])


def test_a_restart_at_every_round_is_gradient_descent() -> None:
    """anchor <- anchor - lr (D + beta D)."""
    restarted = simulate("restarted-diloco", steps_per_round=5, outer_schedule={"restart": 1})
    close(restarted.consensus, simulate("diloco", steps_per_round=5, outer={"name": "sgd", "lr": 0.27 * 1.7}).consensus)


@pytest.mark.parametrize("steps_per_round", [1, 6])
def test_a_quorum_of_all_is_synchronous(steps_per_round: int) -> None:
    run = simulate("async-diloco", straggler={"name": "quorum", "count": 4}, steps_per_round=steps_per_round)
    same = simulate("diloco", outer_learning_rate=0.07, steps_per_round=steps_per_round)
    assert torch.equal(run.consensus, same.consensus)


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
