"""Combinations of parts that cannot work, each with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from peer.outer.local import Replay
from peer.outer.merging import Accelerated, Eager, Elastic
from peer.outer.optimizer import HeavyBall
from peer.outer.robust import CentredClipping, ClippedMean, CoordinateMedian, Gated, TrimmedMean
from peer.outer.schedules import Every, Strided
from peer.outer.straggler import Backup, Quorum
from peer.outer.topology import AllPeers, BandwidthMatching, Neighbours, RandomPairs

if TYPE_CHECKING:
    from peer.outer.recipes import Recipe

Refusal = tuple[str, str]
_ROBUST = (CentredClipping, ClippedMean, CoordinateMedian, Gated, TrimmedMean)
_DRIFTING_MOMENTUM = 0.9  # measured: in pairs the anchors drift apart from here on


def contradictions(recipe: Recipe) -> list[Refusal]:
    """(what contradicts what, what to do) for everything in `recipe` that cannot work together."""
    return [*_payloads(recipe), *_codecs(recipe), *_groups(recipe), *_merges(recipe)]


def _payloads(recipe: Recipe) -> Iterator[Refusal]:
    gradient = recipe.payload == "gradient"
    if gradient and isinstance(recipe.schedule, Strided):
        yield "gradients are sent at every step, fragments once in H", "set payload: delta"
    if gradient and isinstance(recipe.schedule, Every) and recipe.schedule.steps != 1:
        yield (
            f"a gradient of one step says nothing about steps_per_round={recipe.schedule.steps}",
            "set payload: delta, or steps_per_round: 1",
        )
    if gradient and isinstance(recipe.straggler, Quorum | Backup):
        yield (
            "who misses a round that does not wait has other parameters, and its gradient belongs to those",
            "set payload: delta, or straggler: wait",
        )
    if recipe.accumulates and not gradient:
        yield "without an inner optimizer there is no delta to send", "set payload: gradient"


def _codecs(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.exchange == "reduce" and not recipe.dense:
        yield (
            f"the sparse codec {recipe.compressor!r} cannot be reduced part by part: peers choose different elements",
            "set exchange: gather, so that everybody gets every payload",
        )
    if recipe.payload != "parameters":
        return
    if recipe.feedback is not None:
        yield "error feedback belongs to differences; parameters are sent as they are", "set feedback: none"
    if not recipe.dense and not recipe.compressor.startswith("random"):
        yield (
            f"{recipe.compressor!r} would drop most parameters, and a dropped parameter counts as 0",
            "use a dense codec, or a seeded mask such as random0.01+fp32",
        )


def _groups(recipe: Recipe) -> Iterator[Refusal]:
    if isinstance(recipe.topology, AllPeers):
        return
    if recipe.payload == "gradient":
        yield (
            "averaging gradients in small groups lets the replicas drift apart without end",
            "set payload: parameters, or topology: all",
        )
    if isinstance(recipe.outer, HeavyBall) and recipe.outer.momentum >= _DRIFTING_MOMENTUM:
        yield (
            f"outer momentum {recipe.outer.momentum} in gossip lets the anchors drift apart; below "
            f"{_DRIFTING_MOMENTUM} they meet",
            "set outer_momentum: 0.5, as published (arXiv 2506.10911)",
        )
    if isinstance(recipe.topology, RandomPairs | Neighbours | BandwidthMatching) and isinstance(
        recipe.aggregator, _ROBUST
    ):
        yield (
            "of two contributions nobody can tell which is the liar's: a robust aggregator needs three",
            "set topology: all or groups, or aggregator: mean",
        )


def _merges(recipe: Recipe) -> Iterator[Refusal]:
    whole = isinstance(recipe.schedule, Every)
    if isinstance(recipe.merge, Elastic | Eager) and not isinstance(recipe.topology, AllPeers):
        yield "a merge towards a centre needs one centre that all share", "set topology: all"
    if isinstance(recipe.merge, Eager) and not (
        isinstance(recipe.schedule, Every) and recipe.schedule.overlap_steps in (0, recipe.schedule.steps)
    ):
        yield "merge 'eager' overlaps a whole round", "set schedule: {name: every, steps: H, overlap_steps: H}"
    if isinstance(recipe.merge, Accelerated) and not (
        recipe.payload == "parameters" and isinstance(recipe.topology, Neighbours)
    ):
        yield "merge 'accelerated' mixes parameters on a graph", "set payload: parameters, topology: neighbours"
    if not isinstance(recipe.local, Replay):
        return
    kept = 1.0 - recipe.local.beta
    if not (isinstance(recipe.outer, HeavyBall) and abs(recipe.outer.momentum - kept) < 1e-9):
        yield (
            "local 'replay' needs the outer optimizer heavyball with momentum 1 - beta",
            f"set outer: {{name: heavyball, lr: 1.0, momentum: {kept:g}}}",
        )
    if not whole or recipe.overlap_steps:
        yield "local 'replay' starts from whole anchors", "set schedule: {name: every, steps: H}"
