"""Whatever the parts, and whoever comes and goes: nothing breaks, no work is lost or counted twice, bytes add up."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from peer.errors import UserError
from peer.outer.compress.registry import COMPRESSORS
from peer.outer.optim import inner_lr
from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import Recipe
from peer.outer.topology.topologies import AllPeers
from peer.sim.campaign.simulation import Simulation
from peer.sim.world.scenario import PeerProfile
from tests.sim.tiny import PUBLISHED, SGD, commits_of, recipe_of, simulate
from tests.sim.tiny_task import BATCH, DriftTask

VECTOR_BYTES = 416 * 4
PARTS = {
    "compressor": ["int8", "int4", "fp4", "top8/64+int8", "dct8+top8/64+fp32", "threshold0.1+fp32", "random0.2+bf16"],
    "exchange": ["gather", "reduce"],
    "feedback": ["none", "sparseloco", {"name": "error-feedback", "decay": 1.0}],
    "payload": ["delta", "gradient", "parameters"],
    "schedule": [
        {"name": "every", "steps": 3}, {"name": "every", "steps": 4, "overlap_steps": 4},
        {"name": "strided", "period": 4, "num_fragments": 3, "overlap_steps": 1}, {"name": "timer", "rate": 0.4},
        {"name": "every", "steps": 2, "growth": 1.5, "warm_start_steps": 4}, "selsync", "ddp",
    ],
    "local": ["fedprox", "plain", {"name": "proximal", "mu": 0.1, "decoupled": True}, "palsgd"],
    "merge": ["carry", {"name": "mix", "alpha": 0.5}, {"name": "elastic", "a": 0.2}, "eager-diloco"],
    "topology": ["all", "pairs", {"name": "groups", "size": 3}, {"name": "neighbours", "graph": "torus"}, "saps"],
    "aggregator": [
        {"name": "mean", "normalise": "members"}, "clipped", "trimmed", "median", "centred-clipping", "direction",
        "edit",
    ],
    "outer": [
        {"name": "sgd", "lr": 0.5}, {"name": "heavyball", "lr": 0.7, "momentum": 0.5}, {"name": "sign", "lr": 0.01},
        "heloco", {"name": "adam", "lr": 0.02}, {"name": "delayed-nesterov", "lr": 0.5, "momentum": 0.9, "every": 2},
    ],
    "outer_schedule": ["pier", "restarted-diloco", {"name": "stages", "decay_from": 0.2, "final_lr": 0.1}],
    "straggler": [
        {"name": "wait", "deadline_s": 1.5}, {"name": "quorum", "count": 3, "grace_s": 0.5},
        {"name": "backup", "window": 2, "minimum": 3}, {"name": "compute-timeout", "tau_s": 0.6},
    ],
    "allocator": ["time-balanced", {"name": "adaptive-topk", "base_ratio": 0.1}],
}


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A published recipe with up to four parts from elsewhere, if these can work together."""
    name = draw(st.sampled_from(sorted(RECIPES)))
    kinds = draw(st.lists(st.sampled_from(sorted(PARTS)), max_size=4, unique=True))
    overrides = {kind: draw(st.sampled_from(PARTS[kind])) for kind in kinds}
    try:
        recipe = recipe_of(name, **overrides)
        return recipe.with_steps_per_round(4) if recipe.steps_per_round > 4 else recipe
    except UserError:
        hypothesis.reject()


def profile(speed: float, jitter: float, rounds_per_transfer: float, presence: Any) -> PeerProfile:
    rate = math.inf if rounds_per_transfer == 0.0 else VECTOR_BYTES / rounds_per_transfer
    return PeerProfile(speed=speed, jitter=jitter, up_bytes_s=rate, down_bytes_s=rate, presence=presence)


def stays(times: list[int]) -> tuple[tuple[float, float], ...]:
    """Joins and leaves in quarters of a second; who comes for the last time stays."""
    moments = sorted({time / 4 for time in times})
    return tuple(
        (join, moments[at + 1] if at + 1 < len(moments) else math.inf)
        for at, join in enumerate(moments) if at % 2 == 0
    )


ALWAYS = ((0.0, math.inf),)
PRESENCE = st.lists(st.integers(0, 120), min_size=1, max_size=6, unique=True).map(stays)
SPEED, JITTER = st.sampled_from([1.0, 1.0, 2.0, 0.5, 0.1]), st.sampled_from([0.0, 0.3])
TRANSFER = st.sampled_from([0.0, 0.1, 1.0, 4.0])
LOYAL = st.builds(profile, SPEED, JITTER, TRANSFER, st.just(ALWAYS))
FICKLE = st.builds(profile, SPEED, JITTER, TRANSFER, PRESENCE)
SWARM = st.tuples(st.lists(LOYAL, min_size=1, max_size=2), st.lists(FICKLE, max_size=3)).map(lambda p: (*p[0], *p[1]))


@hypothesis.settings(max_examples=60)
@hypothesis.given(recipe=recipes(), peers=st.integers(1, 6))
def test_parts_that_are_not_refused_work_together(recipe: Recipe, peers: int) -> None:
    inner = PUBLISHED.model_copy(update={"learning_rate": 0.01})
    run = simulate(recipe, peers=peers, steps=12, inner=inner)
    assert bool(run.consensus.isfinite().all())
    assert run.result.tally.steps >= 12 * peers
    replicas = run.simulation.replicas
    if recipe.shared_anchor:
        assert len({id(replica.learner.outer) for replica in replicas if replica.learner is not None}) == 1
    if recipe.payload == "gradient":
        assert all(torch.equal(local, run.locals[0]) for local in run.locals)


@hypothesis.settings(max_examples=25)
@hypothesis.given(recipe=recipes(), swarm=SWARM)
def test_any_recipe_survives_any_swarm(recipe: Recipe, swarm: tuple[PeerProfile, ...]) -> None:
    inner = PUBLISHED.model_copy(update={"learning_rate": 0.01})
    run = simulate(recipe, profiles=swarm, steps=10, inner=inner)
    assert bool(run.consensus.isfinite().all())
    if recipe.payload == "gradient" and not recipe.overlap_steps:
        present = [r.learner.parameters for r in run.simulation.replicas if r.present and r.learner is not None]
        assert all(torch.equal(local, present[0]) for local in present)


COUNTED = [
    ("fedavg", {"steps_per_round": 4}),
    ("diloco", {"schedule": {"name": "every", "steps": 4, "overlap_steps": 2}}),
    ("diloco", {"schedule": {"name": "every", "steps": 3, "overlap_steps": 3}}),
    ("fedadam", {"steps_per_round": 5, "straggler": {"name": "wait", "deadline_s": 2.0}}),
    ("diloco", {"schedule": {"name": "every", "steps": 5, "overlap_steps": 5},
                "straggler": {"name": "wait", "deadline_s": 1.0}}),
    ("async-diloco", {"steps_per_round": 3}),
    ("paba", {"steps_per_round": 4}),
    ("selsync", {}),
]


@pytest.mark.parametrize(("name", "overrides"), COUNTED, ids=str)
@hypothesis.settings(max_examples=12)
@hypothesis.given(swarm=SWARM)
def test_every_step_is_contributed_once(
    name: str, overrides: dict[str, Any], swarm: tuple[PeerProfile, ...]
) -> None:
    """A contribution holds as many steps as it says, whoever came, left, was late, or saw the anchor move on."""
    inner = SGD.model_copy(update={"learning_rate": 0.125})
    counted: list[tuple[float, float, float]] = []

    def prepare(simulation: Simulation) -> None:
        commit, simulation.sync.nominal_tokens = simulation.sync.commit, 10**9

        def spy(members: Any, sent: Any, *rest: Any) -> Any:
            for contribution in sent:
                steps = contribution.read(0, 416) / -0.125
                claimed = contribution.weight / BATCH if contribution.weight > 1 else 0.0
                counted.append((float(steps.min()), float(steps.max()), claimed))
            return commit(members, sent, *rest)

        simulation.sync.commit = spy  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner_lr, "LOCAL_WARMUP_STEPS", 1)
        simulate(name, profiles=swarm, steps=15, inner=inner, prepare=prepare, task=DriftTask(), **overrides)
    for least, most, claimed in counted:
        assert least == pytest.approx(claimed, abs=1e-3)
        assert most == pytest.approx(claimed, abs=1e-3)


@hypothesis.settings(max_examples=40)
@hypothesis.given(recipe=recipes(), peers=st.integers(2, 6))
def test_traffic_is_what_the_formula_says(recipe: Recipe, peers: int) -> None:
    """All-reduce: 2 (m - 1) / m payloads; gather and gossip: m - 1, plus anchors of their own."""
    run, commits = commits_of(recipe, peers=peers, steps=8, inner=PUBLISHED.model_copy(update={"learning_rate": 0.01}))
    thinned = recipe.compressor.startswith("top") and "topk" in str(recipe.allocator).lower()
    if thinned or not recipe.codec().fixed_size:
        return
    total = 0.0
    for commit in commits:
        size, members = run.simulation.sync.wire_bytes(commit.fragment), len(commit.members)
        if not isinstance(recipe.topology, AllPeers):
            anchor = 4 * run.simulation.sync.lengths[commit.fragment] if recipe.payload == "delta" else 0
            total += members * (members - 1) * (size + anchor)
        elif recipe.exchange == "gather":
            total += members * (members - 1) * size
        else:
            total += 2 * (members - 1) * size
    votes = peers * (peers - 1) * 8 if type(recipe.schedule).__name__ == "GradientChange" else 0
    sent = run.result.bytes_sent_per_peer * peers
    assert total - 1e-6 <= sent <= total + votes + 1e-6


def test_bytes_per_value() -> None:
    """What the tables of the documentation say of each dense codec, on a vector of 416 values."""
    for codec, expected in {"fp32": 1664, "bf16": 832, "int8": 424, "int4": 216, "fp4": 216, "sign": 56}.items():
        assert codec in COMPRESSORS
        run = simulate("fedavg", peers=2, steps=2, steps_per_round=2, compressor=codec)
        assert run.result.bytes_sent_per_peer == pytest.approx(expected, abs=8)
