"""Invariants of the recipes that send little, or seldom; the list is in `test_invariants.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peer.outer.policy.schedules import GradientChange
from peer.sim.campaign.simulation import Simulation
from peer.sim.learner.replica import clip_
from peer.sim.world.scenario import PeerProfile
from tests.sim.tiny import ADAMW, PUBLISHED, SGD, close, commits_of, recipe_of, simulate
from tests.sim.tiny_task import TinyTask

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


# selsync ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("up_bytes_s", [1e6, 1e2, 50.0])
def test_distro_makes_the_same_steps_on_every_network(up_bytes_s: float) -> None:
    """However late its round ends, a step has the rate of the gradients in it."""
    warming = PUBLISHED.model_copy(update={"warmup_steps": 20})
    slow = (PeerProfile(up_bytes_s=up_bytes_s),) * 3
    ends = [simulate("distro", steps=12, peers=3, profiles=profiles, inner=warming) for profiles in (None, slow)]
    assert torch.equal(ends[0].consensus, ends[1].consensus)


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
