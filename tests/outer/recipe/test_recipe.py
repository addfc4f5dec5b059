"""Published numbers, a manifest's own in their place, and what a swarm runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from peer.errors import UserError
from peer.outer.aggregate.base import DirectionAverage, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.penalised import Penalised
from peer.outer.aggregate.robust import CentredClipping, ClippedMean, CoordinateMedian
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.optim.adaptive import Adagrad, Adam, Yogi
from peer.outer.optim.optimizers import DelayedNesterov, HeavyBall, Nesterov, Sgd, SignSgd
from peer.outer.optim.scheduled import Stages
from peer.outer.optim.turned import Turned
from peer.outer.policy.backup import Backup
from peer.outer.policy.local_rules import Plain, Proximal, PseudoSync, Replay
from peer.outer.policy.merge_rules import Accelerated, Eager, Elastic, Mix
from peer.outer.policy.moments import Desynced
from peer.outer.policy.schedules import Every, GradientChange, Strided
from peer.outer.policy.straggler import ComputeTimeout, Quorum, WaitAll
from peer.outer.policy.work_allocation import AdaptiveTopK, TimeBalanced
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import PARTS, Recipe, describe
from peer.outer.recipe.resolve import resolve, swarm_recipe
from peer.outer.topology.topologies import BandwidthMatching, Groups, Neighbours, RandomPairs
from peer.protocol.manifest import RecipeSpec, RoundSpec, RunManifest, parse_manifest
from tests.outer.recipe.resolving import recipe, refused

# Every algorithm that was asked for, and what differs from plain averaging, number by number.
PUBLISHED: dict[str, dict[str, Any]] = {
    "ddp": {"schedule": Every(steps=1), "payload": "gradient"},
    "gpa": {"payload": "gradient", "average": 0.9967, "interpolation": 0.7},
    "des-loc": {"schedule": Every(steps=256), "moments": Desynced(first=3, second=6), "outer": Sgd(lr=1.0)},
    "snoo": {"schedule": Every(steps=100), "outer": Nesterov(lr=0.8, momentum=0.75)},
    "fedavg": {"outer": Sgd(lr=1.0), "aggregator": Mean(normalise="weights"), "merge": Mix(alpha=0.0)},
    "fedadagrad": {"outer": Adagrad(lr=0.1, tau=1e-3)},
    "fedadam": {"outer": Adam(lr=0.1, betas=(0.9, 0.99), tau=1e-3)},
    "fedyogi": {"outer": Yogi(lr=0.01, betas=(0.9, 0.99), tau=1e-3)},
    "fedprox": {"local": Proximal(mu=0.01)},
    "easgd": {"schedule": Every(steps=16), "merge": Elastic(a=0.225), "outer": Sgd(lr=0.9)},
    "papa": {"schedule": Every(steps=10), "merge": Mix(alpha=0.99)},
    "fedglomo": {"local": Replay(beta=0.5), "outer": HeavyBall(lr=1.0, momentum=0.5)},
    "diloco": {"schedule": Every(steps=500), "outer": Nesterov(lr=0.7, momentum=0.9), "inner": "adamw"},
    "opendiloco": {"schedule": Every(steps=500), "outer": Nesterov(lr=0.7, momentum=0.9), "compressor": "int8"},
    "intellect1": {"schedule": Every(steps=100), "outer": Nesterov(lr=0.7, momentum=0.9), "compressor": "int8"},
    "streaming-diloco": {
        "schedule": Strided(period=100, num_fragments=3, overlap_steps=1, blocks_per_fragment=3),
        "merge": Mix(alpha=0.5), "outer": Nesterov(lr=0.4, momentum=0.9), "compressor": "fp4",
    },
    "eager-diloco": {"schedule": Every(steps=30, overlap_steps=30), "merge": Eager()},
    "async-diloco": {"straggler": Quorum(fraction=0.5, slack=0.5), "outer": Nesterov(lr=0.07, momentum=0.9)},
    "heloco": {"schedule": Every(steps=30), "outer": Turned(lr=0.7, momentum=0.9)},
    "sparta": {
        "payload": "parameters", "schedule": Every(steps=20), "topology": Groups(size=16),
        "compressor": "random0.05+fp32",
    },
    "muloco": {
        "schedule": Every(steps=30), "inner": "muon", "outer": Nesterov(lr=0.8, momentum=0.9), "compressor": "int2",
    },
    "sparseloco": {
        "schedule": Every(steps=30), "outer": Sgd(lr=1.0), "exchange": "gather", "compressor": "top64/64x64+int2",
        "feedback": ErrorFeedback(decay=0.95), "aggregator": Mean(normalise="members"),
    },
    "covenant": {
        "schedule": Every(steps=30), "outer": Sgd(lr=1.0), "compressor": "top64/64x64+int2",
        "aggregator": ClippedMean(factor=1.0),
        "outer_schedule": Stages(decay_from=0.15, decay_until=0.5, final_lr=0.4),
    },
    "pier": {
        "schedule": Every(steps=50), "outer": Nesterov(lr=1.1, momentum=0.9),
        "outer_schedule": Stages(
            lazy=0.1, warmup=0.1, momenta=(0.99, 0.95), momenta_for=0.1, decay_from=0.8, decay_until=0.8, final_lr=0.9
        ),
    },
    "edit": {
        "schedule": Every(steps=32), "aggregator": Penalised(threshold=3.0, temperature=1.0, max_norm=10.0),
        "outer": Nesterov(lr=0.7, momentum=0.8),
    },
    "palsgd": {
        "schedule": Every(steps=100), "local": PseudoSync(p=0.2, eta=0.5), "outer": Nesterov(lr=0.25, momentum=0.9),
    },
    "restarted-diloco": {"outer": Nesterov(lr=0.27, momentum=0.7), "outer_schedule": Stages(restart=3)},
    "demo": {
        "schedule": Every(steps=1), "payload": "gradient", "exchange": "gather", "inner": "none",
        "compressor": "dct64+top32/4096+fp32", "feedback": ErrorFeedback(decay=0.999), "outer": SignSgd(lr=1.0),
    },
    "distro": {
        "schedule": Every(steps=1, overlap_steps=1), "feedback": ErrorFeedback(decay=0.995),
        "outer": SignSgd(lr=1.0, weight_decay=0.1),
    },
    "noloco": {
        "schedule": Every(steps=50), "topology": RandomPairs(), "outer": HeavyBall(lr=0.7, momentum=0.5),
    },
    "selsync": {"schedule": GradientChange(delta=0.3, smoothing=25), "payload": "delta", "outer": Sgd(lr=1.0)},
    "dropcompute": {"payload": "gradient", "straggler": ComputeTimeout(tau_s=None)},
    "a2cid2": {"payload": "parameters", "merge": Accelerated(), "topology": Neighbours(graph="ring")},
    "saps": {
        "payload": "parameters", "topology": BandwidthMatching(quantile=0.5, refresh=10),
        "compressor": "random0.01+fp32",
    },
    "dybw": {"payload": "parameters", "straggler": Backup(window=4)},
    "dct-threshold": {"payload": "gradient", "compressor": "threshold0.01+fp32", "feedback": ErrorFeedback(decay=1.0)},
    "sparse-block": {"payload": "gradient", "compressor": "randomblock0.01+fp32", "feedback": ErrorFeedback(decay=1.0)},
    "fusionllm-adatopk": {"payload": "gradient", "allocator": AdaptiveTopK(base_ratio=0.01)},
    "paba": {"allocator": TimeBalanced(), "outer": Sgd(lr=1.0)},
}


def test_all_are_there_under_their_names() -> None:
    assert set(PUBLISHED) <= set(RECIPES)
    assert all(recipe.name == name and recipe.summary for name, recipe in RECIPES.items())
    assert all("arXiv" in RECIPES[name].source for name in PUBLISHED if name != "ddp")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers(name: str) -> None:
    assert {part: getattr(RECIPES[name], part) for part in PUBLISHED[name]} == PUBLISHED[name]
    defaults = {"local": Plain(), "straggler": WaitAll(), "feedback": None} if name in ("fedavg", "diloco") else {}
    assert {part: getattr(RECIPES[name], part) for part in defaults} == defaults


def test_bytes_of_a_kept_value() -> None:
    """SparseLoCo: 12 bits of index and 2 of value, and two bf16 levels: .219 bits a parameter, and .008 for levels."""
    codec = RECIPES["sparseloco"].codec().bind([(64, 64)] * 10)
    assert codec.wire_bytes(40960) * 8 / 40960 == pytest.approx(14 * 64 / 4096, abs=0.01)


@pytest.mark.parametrize("name", RECIPES)
def test_a_bare_name_resolves_to_the_published_recipe(name: str) -> None:
    assert resolve(RecipeSpec(name=name)) == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_description_is_json_and_leads_back_to_the_recipe(name: str) -> None:
    described = json.loads(json.dumps(describe(RECIPES[name]), allow_nan=False))
    parts = {kind: value for kind, value in described.items() if kind in PARTS}
    parts |= {kind: parts[kind] or "none" for kind in ("feedback", "outer_schedule", "moments")}
    for part in parts.values():
        for key, value in part.items() if isinstance(part, dict) else ():
            part[key] = tuple(value) if isinstance(value, list) else value
    others = {key: described[key] for key in ("payload", "exchange", "compressor", "average", "interpolation")}
    assert recipe(name, **parts, **others) == RECIPES[name]
    assert set(parts) == set(PARTS)


# a manifest's own numbers -------------------------------------------------------------------------------------------


def test_every_override_takes_effect() -> None:
    resolved = recipe("diloco", steps_per_round=30, outer_learning_rate=0.4, outer_momentum=0.0, compressor="int8")
    assert resolved.steps_per_round == 30
    assert resolved.compressor == "int8"
    assert resolved.outer == Nesterov(lr=0.4, momentum=0.0)
    assert recipe("fedavg", outer_learning_rate=0.5).outer == Sgd(lr=0.5)


@pytest.mark.parametrize(("overrides", "part", "expected"), [
    ({"outer": "adam"}, "outer", Adam()),
    ({"outer": {"name": "adam", "lr": 0.3}}, "outer", Adam(lr=0.3)),
    ({"outer": {"momentum": 0.5}}, "outer", Nesterov(lr=0.7, momentum=0.5)),
    ({"outer": "fedadam"}, "outer", Adam(lr=0.1, betas=(0.9, 0.99), tau=1e-3)),
    ({"outer": {"name": "fedadam", "lr": 0.3}}, "outer", Adam(lr=0.3, betas=(0.9, 0.99), tau=1e-3)),
    ({"outer": {"name": "adam", "betas": (0.5, 0.9)}}, "outer", Adam(betas=(0.5, 0.9))),
    ({"outer": {"name": "delayed-nesterov", "lr": 1, "momentum": 0.9, "every": 4}}, "outer",
     DelayedNesterov(lr=1, momentum=0.9, every=4)),
    ({"aggregator": "direction"}, "aggregator", DirectionAverage()),
    ({"aggregator": "centred-clipping"}, "aggregator", CentredClipping()),
    ({"topology": {"name": "groups", "size": 3}, "outer": "noloco"}, "topology", Groups(size=3)),
    ({"straggler": {"deadline_s": 2.5}}, "straggler", WaitAll(deadline_s=2.5)),
    ({"straggler": {"name": "quorum", "count": 3}}, "straggler", Quorum(count=3)),
    ({"outer_schedule": {"restart": 4}}, "outer_schedule", Stages(restart=4)),
    ({"outer_schedule": {"name": "pier", "momenta": ()}}, "outer_schedule",
     replace(RECIPES["pier"].outer_schedule or Stages(), momenta=())),
    ({"feedback": {"decay": 0.5}, "compressor": "int4"}, "feedback", ErrorFeedback(decay=0.5)),
    ({"feedback": "sparseloco", "compressor": "int4"}, "feedback", ErrorFeedback(decay=0.95)),
    ({"schedule": {"growth": 2.0}}, "schedule", Every(steps=500, growth=2.0)),
    ({"schedule": "streaming-diloco"}, "schedule",
     Strided(period=100, num_fragments=3, overlap_steps=1, blocks_per_fragment=3)),
    ({"schedule": {"name": "streaming-diloco", "num_fragments": 2}}, "schedule",
     Strided(period=100, num_fragments=2, overlap_steps=1)),
    ({"schedule": {"name": "streaming-diloco", "blocks_per_fragment": 2}}, "schedule",
     Strided(period=100, num_fragments=1, overlap_steps=1, blocks_per_fragment=2)),
    ({"schedule": "streaming-diloco", "steps_per_round": 2}, "schedule",
     Strided(period=2, num_fragments=2, overlap_steps=1, blocks_per_fragment=3)),
    ({"local": {"name": "proximal", "mu": 0.1}}, "local", Proximal(mu=0.1)),
    ({"merge": {"name": "mix", "alpha": 0.25}}, "merge", Mix(alpha=0.25)),
], ids=str)
def test_parts_by_word_by_recipe_and_by_numbers(overrides: dict[str, Any], part: str, expected: object) -> None:
    changed = recipe("diloco", **overrides)
    assert getattr(changed, part) == expected
    untouched = {"name", "source", "summary", "inner", "payload"}
    assert all(getattr(changed, key) == getattr(RECIPES["diloco"], key) for key in untouched)


def test_the_compressor_of_a_recipe_brings_its_feedback_and_exchange() -> None:
    borrowed = recipe("streaming-diloco", compressor="sparseloco", outer="fedadam")
    lender = RECIPES["sparseloco"]
    assert (borrowed.compressor, borrowed.feedback, borrowed.exchange) == (
        lender.compressor, lender.feedback, lender.exchange,
    )
    own = recipe("diloco", compressor="sparseloco", feedback={"name": "error-feedback", "decay": 0.5})
    assert own.feedback == ErrorFeedback(decay=0.5)
    assert recipe("sparseloco", feedback="none").feedback is None


def test_rounds_get_shorter_with_their_overlap() -> None:
    assert recipe("eager-diloco", steps_per_round=7).schedule == Every(steps=7, overlap_steps=7)
    grows = recipe("diloco", schedule={"name": "every", "steps": 10, "growth": 2.0, "max_steps": 40})
    assert grows.with_steps_per_round(100).schedule == Every(steps=100, growth=2.0, max_steps=100)
    assert "decides at every step" in refused("selsync", steps_per_round=5).what


def test_only_the_whole_is_judged() -> None:
    """Each of these alone would be a contradiction."""
    every_step = recipe("fedavg", payload="gradient", steps_per_round=1)
    assert (every_step.payload, every_step.schedule) == ("gradient", Every(steps=1))
    heavy = {"name": "heavyball", "lr": 0.7, "momentum": 0.95}
    assert recipe("diloco", topology="pairs", outer=heavy, outer_momentum=0.5).outer == HeavyBall(lr=0.7, momentum=0.5)


# the swarm ----------------------------------------------------------------------------------------------------------




@pytest.mark.parametrize("name", RECIPES)
def test_a_swarm_runs_every_recipe(name: str) -> None:
    assert swarm_recipe(RecipeSpec(name=name)) == RECIPES[name]


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_a_timer_paces_gossip_and_rounds_of_all(rate: float) -> None:
    timer = {"name": "timer", "rate": rate}
    for name in ("a2cid2", "saps", "noloco", "diloco", "dybw"):
        recipe = swarm_recipe(RecipeSpec(name=name, schedule=timer))
        assert (recipe.rounds.begins(4), recipe.steps_per_round) == ((3, 1) if rate == 1.0 else (10, 3))


def test_infinity_is_described_as_nothing() -> None:
    assert describe(Recipe(
        name="x", source="", summary="", payload="gradient", schedule=Every(steps=1),
        straggler=ComputeTimeout(tau_s=math.inf),
    ))["straggler"]["tau_s"] is None


def manifest_of(recipe: dict[str, Any], **trust: Any) -> RunManifest:
    model = {"architecture": "llama", "config": {}}
    return RunManifest.model_validate({"name": "a", "model": model, "recipe": recipe, "trust": trust})


def test_an_open_run_has_gates_unless_its_manifest_or_its_recipe_names_another_aggregator() -> None:
    assert RunPlan.of(manifest_of({"name": "diloco"})).recipe.aggregator == Gated()
    assert RunPlan.of(manifest_of({"name": "diloco"}, mode="private")).recipe == RECIPES["diloco"]
    assert RunPlan.of(manifest_of({"name": "diloco", "aggregator": "mean"})).recipe.aggregator == Mean()
    assert RunPlan.of(manifest_of({"name": "diloco", "aggregator": "median"})).recipe.aggregator == CoordinateMedian()
    assert replace(RunPlan.of(manifest_of({"name": "lagoon"})).recipe, aggregator=Mean()) == RECIPES["lagoon"]


@pytest.mark.parametrize("straggler", [{"deadline_s": 5.0}, {"name": "backup", "window": 4, "deadline_s": 5.0}])
def test_a_round_waits_as_long_as_the_recipe_says_unless_the_run_says_otherwise(straggler: dict[str, Any]) -> None:
    document = manifest_of({"name": "dybw", "aggregator": "mean"}).model_dump(mode="json", exclude={"rounds"})
    document["recipe"]["straggler"] = {"name": "wait", **straggler}
    manifest = parse_manifest(json.dumps(document), "test")
    assert RunPlan.of(manifest).manifest.rounds.straggler_wait_s == 5.0
    assert parse_manifest(manifest.canonical(), "test") == manifest
    document["rounds"] = {"straggler_wait_s": 8.0}
    with pytest.raises(UserError, match=r"deadline_s=5 and rounds\.straggler_wait_s=8: one must go"):
        RunPlan.of(RunManifest.model_validate(document))


def test_shares_of_a_run_need_its_number_of_rounds() -> None:
    with pytest.raises(UserError, match="outer_schedule says shares of a run") as caught:
        RunPlan.of(manifest_of({"name": "pier"}))
    assert "rounds.total" in caught.value.hint
    manifest = manifest_of({"name": "pier"}).model_copy(update={"rounds": RoundSpec(total=40)})
    assert RunPlan.of(manifest).recipe.outer_schedule == replace(RECIPES["pier"].outer_schedule, rounds=40)  # type: ignore[type-var]
    assert RunPlan.of(manifest_of({"name": "restarted-diloco"})).recipe.outer_schedule == Stages(restart=3)


GROUPS: dict[str, Any] = {"name": "fedavg", "topology": {"name": "groups", "size": 4}}
PLAIN_GROUPS: dict[str, Any] = {**GROUPS, "payload": "parameters"}


def test_an_open_run_of_gossip_has_gates_where_they_can_judge_and_is_refused_where_they_cannot() -> None:
    assert RunPlan.of(manifest_of(PLAIN_GROUPS)).recipe.aggregator == Gated()
    assert RunPlan.of(manifest_of({"name": "noloco"}, mode="private")).recipe == RECIPES["noloco"]
    assert RunPlan.of(manifest_of({"name": "noloco", "aggregator": "mean"})).recipe.aggregator == Mean()
    with pytest.raises(UserError, match=r"in an open run: .* a pair cannot tolerate a malicious member") as pairs:
        RunPlan.of(manifest_of({"name": "noloco"}))
    assert "trust: {mode: private}" in pairs.value.hint
    assert "aggregator: mean to take the risk" in pairs.value.hint
    with pytest.raises(UserError, match="one malicious anchor moves all") as anchors:
        RunPlan.of(manifest_of(GROUPS))
    assert "payload: parameters" in anchors.value.hint
    with pytest.raises(UserError, match="whose mean no aggregator guards"):
        RunPlan.of(manifest_of({**GROUPS, "aggregator": "median"}, mode="private"))


@pytest.mark.parametrize("recipe", ["noloco", "demo"])
def test_a_run_ends_by_tokens_only_where_an_anchor_counts_them(recipe: str) -> None:
    manifest = manifest_of({"name": recipe}, mode="private")
    by_tokens = manifest.model_copy(update={"rounds": RoundSpec(tokens_total=10**9)})
    RunPlan.of(manifest)
    with pytest.raises(UserError, match=f"rounds.tokens_total: with recipe '{recipe}' no peer knows") as told:
        RunPlan.of(by_tokens)
    assert told.value.hint == "set rounds.total instead"


def test_groups_must_fit_the_runs_largest_group() -> None:
    document = manifest_of(PLAIN_GROUPS).model_dump()
    small = RunManifest.model_validate({**document, "rounds": {"max_group": 3}})
    with pytest.raises(UserError, match=r"groups of 4 are larger than rounds\.max_group=3") as caught:
        RunPlan.of(small)
    assert "size: 3" in caught.value.hint


def test_trust_in_gossip_is_told_in_one_line() -> None:
    assert RunPlan.of(manifest_of(PLAIN_GROUPS)).in_words() == (
        "open: aggregator gated, all members weigh alike; gossip in groups, no shared anchor"
    )
    assert RunPlan.of(manifest_of({"name": "noloco", "aggregator": "mean"})).in_words() == (
        "open: aggregator mean (one malicious peer can ruin its group), weights up to 3 x the median; gossip in pairs, "
        "no shared anchor"
    )


def test_trust_is_told_in_one_line() -> None:
    newcomers = "newcomers of less than 10 rounds 20% together"
    gated = f"open: aggregator gated, weights up to 3 x the median, {newcomers}"
    assert RunPlan.of(manifest_of({})).in_words() == gated
    assert RunPlan.of(manifest_of({"name": "diloco", "aggregator": "mean"}, probation_rounds=0)).in_words() == (
        "open: aggregator mean (one malicious peer can ruin it), weights up to 3 x the median"
    )
    assert RunPlan.of(manifest_of({}, mode="private")).in_words() == "private: aggregator mean; every member is trusted"


@pytest.mark.parametrize("growth", [1e308, 2.0, 1.0 + 1e-12])
def test_rounds_that_grow_without_a_bound_have_one(growth: float) -> None:
    grown = recipe("diloco", schedule={"name": "every", "steps": 10, "growth": growth})
    assert [grown.regular_steps(rounds) for rounds in (1, 2**52)] == [10, 2**24]
    assert grown.rounds.begins(2) == 10
