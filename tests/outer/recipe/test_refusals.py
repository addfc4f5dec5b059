"""What a recipe may not say, and with which words it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.outer.recipe.resolving import refused


@pytest.mark.parametrize(("name", "overrides", "what", "hint"), [
    ("dilocco", {}, "unknown recipe 'dilocco'", "did you mean 'diloco'?"),
    ("diloco", {"outer": "nestrov"}, "recipe.outer: unknown outer 'nestrov'", "'nesterov'"),
    ("diloco", {"topology": {"name": "ring"}}, "recipe.topology: unknown topology 'ring'", ""),
    ("diloco", {"outer": {"learning_rate": 0.1}}, "unknown key 'recipe.outer.learning_rate'", "lr"),
    ("diloco", {"aggregator": {"members": 4}}, "unknown key 'recipe.aggregator.members'", "normalise"),
    ("diloco", {"topology": "groups"}, "recipe.topology: 'groups' needs size", "topology: {name: groups, size: ...}"),
    ("diloco", {"outer": {"lr": "high"}}, "recipe.outer.lr='high': must be float", ""),
    ("diloco", {"outer": {"lr": None}}, "recipe.outer.lr=None: must be float", ""),
    ("diloco", {"schedule": {"steps": 1.5}}, "recipe.schedule.steps=1.5: must be int", ""),
    ("diloco", {"schedule": {"steps": True}}, "recipe.schedule.steps=True: must be int", ""),
    ("diloco", {"schedule": {"steps": 0}}, "steps=0: must be at least 1", "published"),
    ("diloco", {"compressor": "int9"}, "unknown codec 'int9'", "int8"),
    ("diloco", {"compressor": "top64/64+int9"}, "codec 'top64/64+int9': unknown values 'int9'", "int8"),
    ("diloco", {"merge": {"name": "mix", "alpha": 2.0}}, "alpha=2.0: must be in [0, 1]", "0 takes the anchor"),
    ("fedavg", {"outer_momentum": 0.9}, "outer_momentum=0.9: recipe 'fedavg' has no outer momentum",
     "its outer optimizer is Sgd"),
    ("diloco", {"straggler": {"name": "quorum", "count": 2, "fraction": 0.5}}, "give exactly one", "count: 2"),
    ("heloco", {"outer": {"kappa": -1.0}}, "kappa=-1.0: must be finite and at least 0", "leave it out"),
    ("des-loc", {"moments": {"first": -1}}, "first=-1: must be at least 0 rounds", "3 and 6"),
    ("palsgd", {"local": {"p": 1.0}}, "p=1.0: must be in [0, 0.9]", "0.2"),
    ("palsgd", {"local": {"eta": -1.0}}, "eta=-1.0: must be finite and at least 0", "0.5 or 1"),
    ("edit", {"aggregator": {"temperature": 0.0}}, "temperature=0.0: must be above 0", "1 and 10"),
    ("edit", {"aggregator": {"threshold": 0.5}}, "threshold=0.5: must be finite and at least 1", "3 is usual"),
    ("pier", {"outer_schedule": {"lazy": 1.5}}, "lazy=1.5: must be in [0, 1]", "a share of the run's rounds"),
    ("pier", {"outer_schedule": {"decay_from": 0.9}}, "decay_from=0.9: must be at most decay_until=0.8", "is the end"),
    ("pier", {"outer_schedule": {"final_lr": 0.0}}, "final_lr=0.0: must be finite and above 0", "leave it out"),
    ("pier", {"outer_schedule": {"momenta": (0.9, 1.0)}}, "momenta=[0.9, 1.0]: each must be in [0, 1)", "[0.99, 0.95]"),
    ("pier", {"outer_schedule": {"restart": -1}}, "restart=-1: must be at least 0", "0 never restarts"),
], ids=str)
def test_a_mistake_is_named_with_what_to_do(name: str, overrides: dict[str, Any], what: str, hint: str) -> None:
    error = refused(name, **overrides)
    assert what in error.what
    assert hint in error.hint


FEEDBACK = {"name": "error-feedback", "decay": 1.0}
GOSSIP = {"topology": "pairs", "outer": "noloco"}


@pytest.mark.parametrize(("name", "overrides", "what", "hint"), [
    ("ddp", {"schedule": "streaming-diloco"}, "gradients are sent at every step", "payload: delta"),
    ("ddp", {"schedule": "selsync"}, "a gradient that no round takes is lost", "schedule: ddp"),
    ("ddp", {"schedule": {"name": "timer"}}, "a gradient that no round takes is lost", "payload: delta"),
    ("ddp", {"steps_per_round": 5}, "a gradient of one step says nothing about rounds", "steps_per_round: 1"),
    ("ddp", {"schedule": {"growth": 2.0}}, "a gradient of one step", "neither grows"),
    ("ddp", {"schedule": {"warm_start_steps": 4, "warm_start_every": 2}}, "a gradient of one step", "warm start"),
    ("ddp", {"straggler": {"name": "quorum", "count": 2}}, "a peer that misses a round", "straggler: wait"),
    ("ddp", {"straggler": {"name": "backup", "window": 2}}, "a peer that misses a round", "straggler: wait"),
    ("ddp", {"straggler": {"deadline_s": 5.0}}, "a peer that misses a round", "without a deadline"),
    ("diloco", {"straggler": "dropcompute"}, "in a long round they wait once", "tau_s: SECONDS"),
    ("demo", {"payload": "delta"}, "without an inner optimizer there is no delta", "payload: gradient"),
    ("ddp", {"local": "fedprox"}, "no local rule looks at an anchor", "local: plain"),
    ("dybw", {"local": "fedprox"}, "no local rule looks at an anchor", "local: plain"),
    ("ddp", {"outer": "diloco"}, "an outer one has nothing to do", "inner learning_rate"),
    ("dybw", {"outer_learning_rate": 0.5}, "an outer one has nothing to do", "payload: delta"),
    ("ddp", {"merge": "carry"}, "there is no anchor to merge", "alpha: 0.0"),
    ("saps", {"merge": "papa"}, "there is no anchor to merge", "alpha: 0.0"),
    ("diloco", {"compressor": "top8/64+fp32"}, "cannot be reduced shard by shard", "exchange: gather"),
    ("dybw", {"feedback": FEEDBACK}, "error feedback belongs to differences", "feedback: none"),
    ("dybw", {"compressor": "top8/64+fp32", "exchange": "gather"}, "a dropped parameter counts as 0", "random0.01"),
    ("diloco", {"average": 0.5, **GOSSIP}, "needs whole anchors", "average: 0"),
    ("fedavg", {"interpolation": 0.5}, "on the way to an average", "average: 0.9"),
    ("streaming-diloco", {"average": 0.5}, "needs whole anchors", "average: 0"),
    ("ddp", {"topology": "pairs"}, "averaging gradients in small groups", "topology: all"),
    ("noloco", {"compressor": "sparseloco"}, "saves an eighth of what int4 takes", "exchange: reduce"),
    ("noloco", {"schedule": "selsync"}, "a call for a round is to all peers", "topology: all"),
    ("noloco", {"allocator": "time-balanced"}, "each round draws others", "allocator: even"),
    ("dybw", {"schedule": {"steps": 4, "overlap_steps": 2}}, "the mean of deltas is the mean of", "payload: delta"),
    ("dybw", {"schedule": "streaming-diloco"}, "the mean of deltas is the mean of", "payload: delta"),
    ("dybw", {"compressor": "saps"}, "what a mask leaves out differs from peer to peer", "name: groups"),
    ("dybw", {"straggler": {"name": "quorum", "count": 2}}, "would undo what the others learned", "name: backup"),
    ("selsync", {"straggler": {"name": "quorum", "count": 2}}, "contributes at its next step", "straggler: wait"),
    ("diloco", {"straggler": {"name": "backup", "window": 4}}, "a window has nothing to add", "name: quorum"),
    ("noloco", {"straggler": {"name": "quorum", "count": 3}}, "drawn before any peer is ready", "topology: all"),
    ("noloco", {"outer_momentum": 0.95}, "lets the anchors drift apart", "outer_momentum: 0.5"),
    ("noloco", {"aggregator": "median"}, "a robust aggregator needs three", "aggregator: mean"),
    ("diloco", {"topology": {"name": "groups", "size": 2}, "outer": "noloco", "aggregator": "trimmed"},
     "a robust aggregator needs three", "topology: all"),
    ("dybw", {"aggregator": "gated"}, "a robust aggregator needs three", "straggler: wait"),
    ("async-diloco", {"straggler": {"name": "quorum", "count": 2}, "aggregator": "clipped"},
     "a robust aggregator needs three", "straggler: wait"),
    ("noloco", {"merge": "easgd"}, "needs one centre that all share", "topology: all"),
    ("eager-diloco", {"outer": "fedadam"}, "which must be linear in its history", "outer: {name: nesterov"),
    ("eager-diloco", {"schedule": {"overlap_steps": 0}}, "'eager' overlaps a whole round", "overlap_steps: H"),
    ("eager-diloco", {"schedule": {"overlap_steps": 3}}, "'eager' overlaps a whole round", "overlap_steps: H"),
    ("a2cid2", {"topology": "all"}, "'accelerated' mixes whole parameters on a graph", "topology: neighbours"),
    ("a2cid2", {"schedule": "streaming-diloco"}, "'accelerated' mixes whole parameters", "name: every"),
    ("diloco", {"local": "fedglomo"}, "'replay' needs the outer optimizer heavyball", "momentum: 0.5"),
    ("fedglomo", {"local": {"beta": 0.25}}, "'replay' needs the outer optimizer heavyball", "momentum: 0.75"),
    ("fedglomo", {"schedule": "streaming-diloco"}, "'replay' starts from whole anchors", "name: every"),
    ("diloco", {"schedule": {"name": "timer", "rate": 2.0}}, "after the first one all peers are alike", "rate: 1"),
    ("des-loc", {"exchange": "gather"}, "the mean of moments is exact", "exchange: reduce"),
    ("des-loc", {"straggler": "async-diloco"}, "moments are averaged with whole parameters", "straggler: wait"),
    ("streaming-diloco", {"moments": "des-loc"}, "moments are averaged with whole parameters", "moments: none"),
    ("ddp", {"outer_schedule": "pier"}, "outer_schedule changes outer steps", "outer_schedule: none"),
    ("eager-diloco", {"outer_schedule": "covenant"}, "outer_schedule changes outer steps", "outer_schedule: none"),
    ("noloco", {"outer": "heloco"}, "the outer optimizer judges whole tensors", "topology: all"),
    ("heloco", {"outer_schedule": {"restart": 2}}, "outer_schedule changes outer steps", "outer_schedule: none"),
    ("fedavg", {"outer_schedule": "pier"}, "needs an outer optimizer with a momentum", "without momenta"),
    ("noloco", {"outer_schedule": "pier"}, "outer momentum 0.99 in gossip", "outer_momentum: 0.5"),
    ("paba", {"schedule": "selsync"}, "'time-balanced' gives each peer a number of steps", "name: every"),
    ("ddp", {"allocator": "time-balanced"}, "'time-balanced' gives each peer a number of steps", "payload: delta"),
    ("fusionllm-adatopk", {"compressor": "int8"}, "but that is no top-k", "top41/4096+fp32"),
], ids=str)
def test_what_cannot_work_together_is_refused_with_its_reason(
    name: str, overrides: dict[str, Any], what: str, hint: str
) -> None:
    error = refused(name, **overrides)
    assert error.what.startswith(f"recipe {name!r}: ")
    assert what in error.what
    assert hint in error.hint


HOSTILE: dict[str, dict[str, Any]] = {
    "draws without end": {"local": {"name": "pseudo-sync", "p": 1.0 - 1e-10, "eta": 0.5}},
    "no number of steps": {"schedule": {"name": "timer", "rate": 5e-324}},
    "beyond whole floats": {"schedule": {"name": "timer", "rate": 1e-18}},
    "a number for several": {"outer_schedule": {"name": "stages", "momenta": 0.5}},
    "one of two": {"outer": {"name": "adam", "lr": 0.1, "betas": (0.9,)}},
    "no cosine": {"outer": {"name": "turned", "lr": 0.7, "momentum": 0.9, "enough": 1.5}},
}


@pytest.mark.parametrize("numbers", HOSTILE.values(), ids=HOSTILE)
def test_numbers_that_would_stop_or_end_a_peer_are_refused_by_name(numbers: dict[str, Any]) -> None:
    (part,) = numbers.values()
    what = refused("diloco", **numbers).what
    assert any(f"{key}={value!r}" in what for key, value in part.items())
