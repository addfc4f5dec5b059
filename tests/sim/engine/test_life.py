"""Swarms that live: peers join, leave and are late, and the network falls apart and heals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.errors import UserError
from peer.sim.campaign.simulation import Simulation
from peer.sim.world.scenario import NetworkSplit, PeerProfile, load_scenario, parse_scenario
from tests.sim.tiny import PUBLISHED, SGD, alone, close, commits_of, simulate
from tests.sim.tiny_task import BATCH, DriftTask, TinyTask

VECTOR_BYTES = 416 * 4
IDEAL = PeerProfile()
SLOW_LINK = PeerProfile(up_bytes_s=VECTOR_BYTES / 4, down_bytes_s=VECTOR_BYTES / 4)
SPOT = b"""
name: short-lives
peers:
  - {share: 0.25, jitter: 0.1, up_mbps: 0.02, down_mbps: 0.02}
  - {share: 0.75, jitter: 0.1, up_mbps: 0.02, down_mbps: 0.02, lifetime_s: 15, away_s: 4}
"""
HALVES = b"""
name: halves
peers: [{share: 1, jitter: 0.1, up_mbps: 0.05, down_mbps: 0.05}]
partitions:
  - {start_s: 8, end_s: 16, sides: [0.5, 0.5]}
  - {start_s: 20.5, end_s: 27.25, sides: [0.625, 0.375]}
"""


def leaves(at_s: float, profile: PeerProfile = IDEAL) -> PeerProfile:
    return replace(profile, presence=((0.0, at_s),))


def joins(at_s: float, profile: PeerProfile = IDEAL) -> PeerProfile:
    return replace(profile, presence=((at_s, math.inf),))


def mean_alone(peers: Sequence[int], steps: int) -> Tensor:
    return torch.stack([alone(peer, steps, SGD) for peer in peers]).mean(0)


# the same again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [
    *(load_scenario(name) for name in ("home", "straggler", "byzantine")),
    parse_scenario(SPOT, "spot"), parse_scenario(HALVES, "halves"),
], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize(("name", "overrides"), [
    ("ddp", {}),
    ("diloco", {"steps_per_round": 5, "straggler": {"deadline_s": 3.0}}),
    ("streaming-diloco", {"steps_per_round": 6, "compressor": "sparseloco"}),
    ("noloco", {"steps_per_round": 3}),
    ("async-diloco", {"steps_per_round": 4}),
])
def test_the_same_seed_gives_the_same_bits(name: str, overrides: dict[str, Any], scenario: Any) -> None:
    def run(seed: int) -> tuple[Tensor, dict[str, Any]]:
        done = simulate(
            name, profiles=scenario.draw(8, 0, horizon_s=100.0), steps=9, seed=seed, evaluations=3, inner=PUBLISHED,
            partitions=scenario.partitions, **overrides,
        )
        return done.consensus, asdict(done.result) | {"wall_seconds": 0.0, "seed": 0}

    (first, figures), (again, same_figures) = run(1), run(1)
    assert torch.equal(first, again)
    assert figures == same_figures
    assert bool(first.isfinite().all())


def test_another_seed_gives_other_times() -> None:
    profiles = load_scenario("home").draw(4, 0)
    times = {simulate("ddp", profiles=profiles, steps=5, seed=seed).result.virtual_seconds for seed in range(3)}
    assert len(times) == 3


# exchanges that fail ------------------------------------------------------------------------------------------------


def test_a_killed_exchange_changes_nothing() -> None:
    """Three of four members make it again without the fourth, from the anchor that all of them had."""
    profiles = (SLOW_LINK, SLOW_LINK, SLOW_LINK, leaves(12.0, SLOW_LINK))
    run, commits = commits_of("fedavg", profiles=profiles, steps=12, steps_per_round=10, inner=SGD)
    assert run.result.tally.aborted == 1
    assert commits[0].members == (0, 1, 2)
    assert torch.equal(commits[0].anchors[0], TinyTask().initial())
    close(commits[1].anchors[0], mean_alone([0, 1, 2], 10))


def test_a_round_that_nobody_could_finish_is_carried_by_the_next() -> None:
    """A cut of half a second during the exchange: one round of twice the steps, and of twice the weight."""
    cut = NetworkSplit(start_s=12.0, end_s=12.5, sides=(0.5, 0.5))
    run, commits = commits_of(
        "fedavg", profiles=(SLOW_LINK,) * 4, steps=20, steps_per_round=10, inner=SGD, partitions=[cut]
    )
    assert run.result.tally.aborted == 1
    assert len(commits) == 1
    close(run.consensus, mean_alone(range(4), 20))


@pytest.mark.parametrize("name", ["sparseloco", "selsync"])
def test_what_was_encoded_for_nothing_comes_back_to_the_residual(name: str) -> None:
    cut = NetworkSplit(start_s=10.25, end_s=10.5, sides=(0.5, 0.5))
    feedback = {"name": "error-feedback", "decay": 1.0}
    compression = {"compressor": "top4/64+fp32", "exchange": "gather", "feedback": feedback}
    arguments = {"steps_per_round": 10} if name == "sparseloco" else {"schedule": {"delta": 0.05, "smoothing": 3}}
    run, commits = commits_of(
        name, profiles=(SLOW_LINK,) * 4, steps=40, partitions=[cut], inner=SGD, **compression, **arguments
    )
    assert run.result.tally.aborted >= 1 or name == "selsync"
    learned = sum(
        (torch.stack([a - x for a, x in zip(c.anchors, c.locals, strict=True)]).mean(0) for c in commits),
        torch.zeros_like(run.consensus),
    )
    residuals = [r.learner.encoders[0].residual for r in run.simulation.replicas if r.learner is not None]
    left = torch.stack([residual for residual in residuals if residual is not None]).mean(0)
    close(TinyTask().initial() - run.consensus + left, learned, 1e-5)


def test_members_of_a_broken_quorum_do_not_wait_for_ever() -> None:
    profiles = (SLOW_LINK, leaves(12.0, SLOW_LINK), replace(SLOW_LINK, speed=0.9), replace(SLOW_LINK, speed=0.8))
    run = simulate("async-diloco", profiles=profiles, steps=40, steps_per_round=10)
    assert run.result.tally.aborted == 1
    assert run.simulation.replicas[0].steps > 40


@pytest.mark.parametrize("name", ["ddp", "fedavg", "noloco", "eager-diloco", "async-diloco", "dybw"])
def test_everybody_may_leave_at_once_and_return(name: str) -> None:
    back = replace(SLOW_LINK, presence=((0.0, 12.0), (15.0, math.inf)))
    steps = {} if name in ("ddp", "dybw") else {"steps_per_round": 5}
    run = simulate(name, profiles=[back] * 4, steps=30, **steps)
    assert (run.result.tally.leaves, run.result.tally.joins) == (4, 4)
    assert run.loss < 2.87
    with pytest.raises(UserError, match=r"the swarm died after \d+ of 120 steps"):
        simulate(name, profiles=[leaves(12.0)] * 4, steps=30, **steps)


# joining and lateness -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [20.0, 20.7, 21.5, 23.1])
@pytest.mark.parametrize("name", ["ddp", "demo", "dct-threshold"])
def test_a_newcomer_holds_the_same_weights_whenever_it_comes(name: str, at_s: float) -> None:
    fast = replace(SLOW_LINK, up_bytes_s=VECTOR_BYTES / 2, down_bytes_s=VECTOR_BYTES / 2)
    run = simulate(name, profiles=(fast, fast, fast, joins(at_s, fast)), steps=22, inner=PUBLISHED)
    assert run.simulation.replicas[3].steps > 2
    assert all(torch.equal(local, run.locals[0]) for local in run.locals)


@pytest.mark.parametrize("at_s", [10.5, 13.0])
@pytest.mark.parametrize("steps_per_round", [10, 4])
def test_a_newcomer_contributes_what_it_has_learned_and_no_more(at_s: float, steps_per_round: int) -> None:
    """Even if it comes while the others exchange, so that the anchor moves on under it."""
    seen: list[tuple[Tensor, int]] = []

    def prepare(simulation: Simulation) -> None:
        commit = simulation.sync.commit

        def spy(members: Any, sent: Any, *rest: Any) -> Any:
            seen.extend((c.read(0, 416), c.weight) for c in sent if c.member == 3)
            return commit(members, sent, *rest)

        simulation.sync.commit = spy  # type: ignore[method-assign]

    profiles = (SLOW_LINK, SLOW_LINK, SLOW_LINK, joins(at_s, SLOW_LINK))
    inner = SGD.model_copy(update={"learning_rate": 0.01})
    simulate("diloco", profiles=profiles, steps=40, steps_per_round=steps_per_round, inner=inner, prepare=prepare)
    assert seen
    for sent, weight in seen:  # a step moves by at most lr times the norm of a gradient
        assert float(sent.norm()) < 0.01 * 2.0 * weight / BATCH


def test_moments_of_a_newcomer_are_fresh_and_of_others_kept() -> None:
    run = simulate("diloco", profiles=(IDEAL, joins(20.5)), steps=30, steps_per_round=10)
    old, new = (replica.learner for replica in run.simulation.replicas)
    assert old is not None
    assert new is not None
    assert old.optimizer.steps == run.simulation.replicas[0].steps  # type: ignore[attr-defined]
    assert new.optimizer.steps == run.simulation.replicas[1].steps < 30  # type: ignore[attr-defined]


@pytest.mark.parametrize(("deadline_s", "rounds"), [(3.0, 1), (12.0, 2)])
def test_a_slow_peer_with_a_deadline_takes_part_with_what_it_has(deadline_s: float, rounds: int) -> None:
    profiles = (replace(IDEAL, speed=0.1), IDEAL, IDEAL, IDEAL)
    waiting = {"straggler": {"name": "wait", "deadline_s": deadline_s}}
    run, commits = commits_of("fedavg", profiles=profiles, steps=60, steps_per_round=10, inner=SGD, **waiting)
    patient = simulate("fedavg", profiles=profiles, steps=60, steps_per_round=10, inner=SGD)
    assert run.result.virtual_seconds < 0.5 * patient.result.virtual_seconds
    assert sum(0 in commit.members for commit in commits[:-1]) >= rounds
    assert run.loss < 2.2


def test_a_late_peer_keeps_its_progress_on_top_of_the_anchor() -> None:
    """Peer 0 needs 15 s for its 10 steps and misses the round at 12 s: its steps come with the next one."""
    profiles = (replace(IDEAL, speed=10 / 15), IDEAL)
    seen: list[tuple[int, ...]] = []
    run, commits = commits_of(
        "fedavg", profiles=profiles, steps=16, steps_per_round=10, inner=SGD,
        straggler={"name": "wait", "deadline_s": 2.0},
    )
    seen = [commit.members for commit in commits]
    assert seen[0] == (1,)
    close(commits[1].anchors[0], alone(1, 10, SGD))
    assert seen[1] == (0, 1)
    assert run.result.tally.late == 1


def test_contributions_weigh_by_their_tokens() -> None:
    """Who was alone for half of the round has learned twice as much, and weighs twice as much."""
    _, commits = commits_of("fedavg", profiles=(IDEAL, joins(5.5)), steps=10, steps_per_round=10, inner=SGD)
    assert commits[0].members == (0, 1)
    old, new = commits[0].locals
    close(commits[1].anchors[0], (10 * old + 5 * new) / 15)


# partitions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "overrides"), [
    ("ddp", {}), ("demo", {}), ("sparse-block", {}), ("fedavg", {"steps_per_round": 5}),
    ("diloco", {"steps_per_round": 5}), ("streaming-diloco", {"steps_per_round": 6}), ("easgd", {"steps_per_round": 4}),
])
def test_there_is_one_lineage_after_a_partition(name: str, overrides: dict[str, Any]) -> None:
    sides: set[int] = set()
    anchors: set[int] = set()

    def watch(simulation: Simulation) -> None:
        now = {id(r.learner.outer) for r in simulation.replicas if r.learner is not None}
        sides.update(r.side for r in simulation.replicas)
        anchors.add(len(now))

    parts = [
        NetworkSplit(start_s=7.5, end_s=14.5, sides=(0.25, 0.75)),
        NetworkSplit(start_s=20, end_s=25, sides=(0.5, 0.5)),
    ]
    run = simulate(name, steps=30, partitions=parts, watch=watch, **overrides)
    assert (sides, anchors, run.result.tally.heals) == ({0, 1}, {1, 2}, 2)
    learners = [replica.learner for replica in run.simulation.replicas if replica.learner is not None]
    assert all(learner.outer is learners[0].outer for learner in learners)
    if name in ("ddp", "demo", "sparse-block"):
        assert all(torch.equal(local, run.locals[0]) for local in run.locals)
    assert run.loss < simulate(name, steps=8, **overrides).loss


def test_the_larger_side_wins_and_the_smaller_one_loses_no_work() -> None:
    """Cut between steps 10 and 19: at 20 one side brings 5 steps on top of the new anchor, the other all of its 10."""
    part = NetworkSplit(start_s=10.5, end_s=19.5, sides=(0.25, 0.75))
    _, commits = commits_of("fedavg", steps=20, steps_per_round=5, inner=SGD, partitions=[part], task=DriftTask())
    everybody = (0, 1, 2, 3)
    assert [commit.members for commit in commits] == [everybody, everybody, (0,), (1, 2, 3), everybody]
    healed, rate = commits[-1], SGD.learning_rate
    for peer, steps in enumerate((10, 5, 5, 5)):
        close(healed.anchors[peer], torch.full((416,), 15 * rate))
        close(healed.locals[peer] - healed.anchors[peer], torch.full((416,), steps * rate))
