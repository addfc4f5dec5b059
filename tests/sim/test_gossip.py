"""Invariants of the recipes whose peers meet in pairs or groups; the list is in `test_invariants.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.outer.recipe import validation
from peer.outer.recipe.published import RECIPES
from peer.outer.state.gossip_mixing import pair_
from tests.sim.tiny import SGD, close, commits_of, recipe_of, scatter, simulate, spread
from tests.sim.tiny_task import StillTask

# noloco -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peers", "topology"), [(2, "pairs"), (4, {"name": "groups", "size": 4})])
def test_noloco_in_one_group_is_heavy_ball_diloco(peers: int, topology: Any) -> None:
    run = simulate("noloco", peers=peers, steps_per_round=6, topology=topology)
    same = simulate("diloco", peers=peers, steps_per_round=6, outer={"name": "heavyball", "lr": 0.7, "momentum": 0.5})
    for replica in run.simulation.replicas:
        assert replica.learner is not None
        assert torch.equal(replica.learner.outer.anchor, same.consensus)


@pytest.mark.parametrize(("momentum", "low", "high"), [(0.5, 0.0, 1e-3), (0.9, 2.0, math.inf)])
def test_the_spread_of_noloco_anchors(
    momentum: float, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_LARGEST_MOMENTUM", 1.0)
    run, commits = commits_of(
        "noloco", peers=8, steps=60, steps_per_round=1, task=StillTask(), inner=SGD, prepare=scatter,
        outer={"momentum": momentum},
    )
    growth = spread(run.locals) / spread(commits[0].anchors)
    assert low <= growth < high


# gossip -------------------------------------------------------------------------------------------------------------


def test_a_mask_on_a2cid2_keeps_what_it_leaves_out_and_slows_its_flow() -> None:
    masked = recipe_of("a2cid2", compressor="random0.25+fp32", exchange="gather")
    (eta, alpha), (whole_eta, whole_alpha) = masked.acceleration(6), RECIPES["a2cid2"].acceleration(6)
    assert (eta, alpha) == pytest.approx((0.25 * whole_eta, whole_alpha))
    x, x_tilde = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    pair_(x, x_tilde, torch.tensor([5.0, 0.0, 0.0]), 1.0, torch.tensor([1.0, 0.0, 0.0]))
    assert (x.tolist(), x_tilde.tolist()) == ([3.0, 2.0, 3.0], [5.0, 2.0, 3.0])


def test_a2cid2_without_eta_is_plain_gossip() -> None:
    plain = simulate("saps", topology={"name": "neighbours", "graph": "ring"}, compressor="fp32", exchange="reduce")
    for alpha in (0.0, 0.5, 3.0):
        run = simulate("a2cid2", merge={"eta": 0.0, "alpha_tilde": alpha})
        for one, other in zip(run.locals, plain.locals, strict=True):
            close(one, other, 2e-6)


@pytest.mark.parametrize("peers", [4, 5, 9])
@pytest.mark.parametrize("name", ["a2cid2", "saps", "dybw"])
def test_gossip_conserves_the_mean(name: str, peers: int) -> None:
    run, commits = commits_of(name, peers=peers, steps=80, task=StillTask(), inner=SGD, prepare=scatter)
    start = commits[0].locals
    close(torch.stack(run.locals).mean(0), torch.stack(start).mean(0), 1e-5)
    limit = {"a2cid2": 0.1, "saps": 0.95, "dybw": 1e-5}[name]
    assert spread(run.locals) < limit * spread(start)


def test_saps_averages_pairs_on_a_common_mask() -> None:
    mask = "random0.1+fp32"
    run, commits = commits_of("saps", steps=3, task=StillTask(), inner=SGD, prepare=scatter, compressor=mask)
    after = [commit.locals for commit in commits[1:]] + [run.locals]
    masks: dict[int, list[Tensor]] = {}
    for commit, changed in zip(commits, after, strict=True):
        a, b = commit.members
        moved = [(changed[peer] - commit.locals[peer]).abs() > 1e-7 for peer in (a, b)]
        assert torch.equal(*moved)
        close(changed[a][moved[0]], changed[b][moved[0]])
        close(changed[a] + changed[b], commit.locals[a] + commit.locals[b])
        masks.setdefault(commit.number, []).append(moved[0])
    assert [int(mask.sum()) for mask in masks[1]] == [42, 42]  # ceil(.1 * 416)
    assert torch.equal(*masks[1])  # one mask for all pairs of a round
    assert not torch.equal(masks[1][0], masks[2][0])


def test_saps_with_every_coordinate_is_pair_averaging() -> None:
    run, commits = commits_of("saps", steps=1, task=StillTask(), inner=SGD, prepare=scatter, compressor="random1+fp32")
    for commit in commits:
        a, b = commit.members
        mean = (commits[0].locals[a] + commits[0].locals[b]) / 2
        close(run.locals[a], mean)
        close(run.locals[b], mean)


def test_dybw_that_waits_for_all_averages_all() -> None:
    run, commits = commits_of("dybw", steps=10, straggler={"window": 1})
    after = [commit.locals for commit in commits[1:]]
    assert [commit.members for commit in commits] == [(0, 1, 2, 3)] * 10
    assert all(torch.equal(local, run.locals[0]) for local in run.locals)
    close(run.locals[0], torch.stack(commits[-1].locals).mean(0))
    assert spread(after[0]) > 1e-3
    close(run.consensus, simulate("selsync", steps=10).consensus, 2e-6)
