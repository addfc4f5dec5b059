"""Combinations of parts that cannot work, each with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator

from peer.errors import UserError
from peer.outer.optim.optimizers import HeavyBall, Nesterov, Sgd
from peer.outer.optim.turned import Turned
from peer.outer.policy.backup import Backup
from peer.outer.policy.local_rules import Plain, Replay
from peer.outer.policy.merge_rules import Accelerated, Eager, Elastic, Mix
from peer.outer.policy.schedules import Every, Strided, Timer
from peer.outer.policy.straggler import Quorum, WaitAll
from peer.outer.policy.work_allocation import AdaptiveTopK, TimeBalanced
from peer.outer.recipe.recipe import Recipe
from peer.outer.topology.topologies import AllPeers, BandwidthMatching, Groups, Neighbours, RandomPairs

Refusal = tuple[str, str]
LEAST_TO_JUDGE = 3  # contributions
_LARGEST_MOMENTUM = 0.8  # measured with lr .7: the spread of anchors grows from .82 (64 peers) to .88 (8 peers) on


def checked(recipe: Recipe) -> Recipe:
    """The same recipe.

    Raises:
        UserError: its parts contradict each other, with the reason and what to do instead.
    """
    for problem, hint in validate(recipe):
        raise UserError(f"recipe {recipe.name!r}: {problem}", hint)
    return recipe


def validate(recipe: Recipe) -> list[Refusal]:
    """(what contradicts what, what to do) for everything in `recipe` that cannot work together."""
    kinds = (
        _payloads, _codecs, _groups, _gossip, _shared_means, _waits, _merges, _allocators, _averages, _stages, _moments,
    )  # fmt: skip
    return [refusal for kind in kinds for refusal in kind(recipe)]


def _payloads(recipe: Recipe) -> Iterator[Refusal]:
    gradient, schedule = recipe.payload == "gradient", recipe.schedule
    if gradient and isinstance(schedule, Strided):
        yield "gradients are sent at every step, fragments once in H", "set payload: delta"
    elif gradient and not isinstance(schedule, Every):
        yield "a gradient that no round takes is lost: each step needs one", "set payload: delta, or schedule: ddp"
    elif gradient and isinstance(schedule, Every) and not _at_every_step(schedule):
        yield (
            f"a gradient of one step says nothing about rounds of several steps (steps_per_round={schedule.steps})",
            "set payload: delta, or steps_per_round: 1 that neither grows nor has a warm start",
        )
    if gradient and not recipe.straggler.waits_for_all:
        yield (
            "a peer that misses a round has other parameters, and its gradient belongs to those",
            "set payload: delta, or straggler: wait, without a deadline",
        )
    if (timeout := recipe.straggler.timeout) is not None and timeout.tau_s is None and not gradient:
        yield (
            "a time limit is chosen for peers that wait for the slowest at every step; in a long round they wait once",
            "set straggler: {name: compute-timeout, tau_s: SECONDS}, or payload: gradient",
        )
    if isinstance(schedule, Timer) and schedule.rate > 1.0 and isinstance(recipe.topology, AllPeers):
        yield (
            f"rate={schedule.rate} has several rounds after a step, and after the first one all peers are alike",
            "set schedule: {name: timer, rate: 1}, or a topology of pairs, groups or neighbours",
        )
    if recipe.accumulates and not gradient:
        yield "without an inner optimizer there is no delta to send", "set payload: gradient"
    yield from _unused(recipe)


def _unused(recipe: Recipe) -> Iterator[Refusal]:
    """Parts that would silently have no effect."""
    if recipe.payload == "delta":
        return
    sent = "gradients" if recipe.payload == "gradient" else "parameters"
    if not isinstance(recipe.local, Plain):
        yield f"{sent} are sent, and no local rule looks at an anchor", "set payload: delta, or local: plain"
    if recipe.outer != Sgd(lr=1.0) and not recipe.accumulates:
        yield (
            f"{sent} are sent, and the inner optimizer makes every step: an outer one has nothing to do",
            "set payload: delta, or outer: {name: sgd, lr: 1.0} and the inner learning_rate",
        )
    if recipe.merge != Mix(alpha=0.0) and not isinstance(recipe.merge, Accelerated):
        yield (
            f"{sent} are sent, and there is no anchor to merge",
            "set payload: delta, or merge: {name: mix, alpha: 0.0}",
        )


def _at_every_step(schedule: Every) -> bool:
    grows = schedule.growth > 1.0 and schedule.max_steps != 1
    return schedule.steps == 1 and not grows and (schedule.warm_start_steps == 0 or schedule.warm_start_every == 1)


def _codecs(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.exchange == "reduce" and not recipe.dense:
        yield (
            f"the sparse codec {recipe.compressor!r} cannot be reduced shard by shard: peers choose different elements",
            "set exchange: gather, so that all members get every payload",
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


def _averages(recipe: Recipe) -> Iterator[Refusal]:
    whole = recipe.shared_anchor and isinstance(recipe.schedule, Every)
    if recipe.average and not whole:
        yield (
            f"average={recipe.average} needs whole anchors that all share, one after the other",
            "set average: 0, or payload: delta or gradient, topology: all and schedule: every",
        )
    if recipe.interpolation and not recipe.average:
        yield (
            f"interpolation={recipe.interpolation} is on the way to an average, and average is 0",
            "set average: 0.9, or interpolation: 0",
        )


def _stages(recipe: Recipe) -> Iterator[Refusal]:
    stages = recipe.outer_schedule
    if stages is None:
        return
    relied_on = isinstance(recipe.merge, Eager) or isinstance(recipe.local, Replay) or isinstance(recipe.outer, Turned)
    if recipe.payload != "delta" or relied_on:
        yield (
            "outer_schedule changes outer steps; gradients and parameters have none, and merge 'eager', local "
            "'replay' and outer 'turned' rely on one that stays as it is",
            "set outer_schedule: none",
        )
    if stages.momenta and not hasattr(recipe.outer, "momentum"):
        yield (
            f"outer_schedule.momenta={list(stages.momenta)} needs an outer optimizer with a momentum",
            "set outer: {name: nesterov, lr: ..., momentum: ...}, or outer_schedule without momenta",
        )


def _moments(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.moments is None:
        return
    whole = isinstance(recipe.schedule, Every) and not recipe.overlap_steps and recipe.shared_anchor
    alike = isinstance(recipe.straggler, WaitAll) and not recipe.allocator.uneven
    if not (whole and alike and recipe.payload == "delta"):
        yield (
            "moments are averaged with whole parameters, by peers that have just made the same number of steps",
            "set moments: none, or payload: delta, topology: all, straggler: wait, allocator: even and schedule: "
            "{name: every, steps: H}",
        )
    if recipe.exchange != "reduce" or recipe.feedback is not None:
        yield (
            "the mean of moments is exact: there is nothing to choose from, and no loss to feed back",
            "set moments: none, or exchange: reduce and feedback: none",
        )
    if recipe.inner in ("sgd", "none"):
        yield f"the inner optimizer {recipe.inner} has no moments", "set moments: none"


def _groups(recipe: Recipe) -> Iterator[Refusal]:
    topology, straggler = recipe.topology, recipe.straggler
    pairs = isinstance(topology, RandomPairs | Neighbours | BandwidthMatching) or (
        isinstance(topology, Groups) and topology.size < LEAST_TO_JUDGE
    )
    few = (isinstance(straggler, Backup) and straggler.minimum < LEAST_TO_JUDGE) or (
        isinstance(straggler, Quorum) and straggler.count is not None and straggler.count < LEAST_TO_JUDGE
    )
    if recipe.aggregator.robust and (pairs or few):
        yield (
            "of two contributions no aggregator can tell which is malicious: a robust aggregator needs three",
            "set topology: all, straggler: wait, or aggregator: mean",
        )
    if isinstance(topology, AllPeers):
        return
    if isinstance(recipe.straggler, Quorum | Backup):
        yield (
            "partners are drawn before any peer is ready; a round of the peers that are ready contradicts that",
            "set topology: all, or straggler: wait, with a deadline_s if need be",
        )
    if recipe.payload == "gradient":
        yield (
            "averaging gradients in small groups lets the replicas drift apart without bound",
            "set payload: parameters, or topology: all",
        )
    if not recipe.outer.elementwise:
        yield "the outer optimizer judges whole tensors, and gossip steps stretches of them", "set topology: all"
    momenta = () if recipe.outer_schedule is None else recipe.outer_schedule.momenta
    if isinstance(recipe.outer, HeavyBall) and (most := max((recipe.outer.momentum, *momenta))) > _LARGEST_MOMENTUM:
        yield (
            f"outer momentum {most} in gossip lets the anchors drift apart; up to "
            f"{_LARGEST_MOMENTUM} they converge",
            "set outer_momentum: 0.5, as published (arXiv 2506.10911)",
        )


def _gossip(recipe: Recipe) -> Iterator[Refusal]:
    if not recipe.gossips:
        return
    if recipe.exchange == "gather" and recipe.payload == "delta":
        yield (
            "with payload delta the members of a group also send their anchors, in fp32: beside these a sparse payload "
            "saves an eighth of what int4 takes, at most",
            "set exchange: reduce and a dense compressor, or payload: parameters",
        )
    if recipe.votes is not None:
        yield "a call for a round is to all peers, and a group of a few cannot answer it for all", "set topology: all"
    if recipe.allocator.reads_claims:
        yield (
            "work is divided so that the members of a round are ready together, and each round draws others",
            "set allocator: even, or topology: all",
        )


def _shared_means(recipe: Recipe) -> Iterator[Refusal]:
    if not recipe.shares_mean:
        return
    if not recipe.dense:
        yield (
            "what a mask leaves out differs from peer to peer, and with topology all they share one state",
            "set topology: {name: groups, size: 4}",
        )
    elif recipe.votes is not None or recipe.num_fragments > 1 or recipe.overlap_steps:
        yield (
            "from an anchor that all share, the mean of deltas is the mean of parameters, and it can be in fragments, "
            "late and called for without loss",
            "set payload: delta",
        )
    if isinstance(recipe.straggler, Quorum):
        yield (
            "late parameters would undo what the others learned meanwhile",
            "set payload: delta, or straggler: {name: backup, window: 4}",
        )


def _waits(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.straggler.asynchronous and recipe.votes is not None:
        yield (
            "in a round that a peer calls for, each contributes at its next step: none is late",
            "set straggler: wait",
        )
    elif isinstance(recipe.straggler, Backup) and recipe.payload == "delta":
        yield (
            "an anchor that all share connects all peers in every round: a window has nothing to add",
            "set straggler: {name: quorum, fraction: 0.5}, or payload: parameters",
        )


def _merges(recipe: Recipe) -> Iterator[Refusal]:
    whole = isinstance(recipe.schedule, Every)
    if isinstance(recipe.merge, Eager) and not isinstance(recipe.outer, Sgd | Nesterov | HeavyBall):
        yield (
            "with merge 'eager' a peer adds its own share of the outer step early, which must be linear in its history",
            "set outer: {name: nesterov, lr: 0.7, momentum: 0.9}, sgd or heavyball",
        )
    if isinstance(recipe.merge, Elastic | Eager) and not isinstance(recipe.topology, AllPeers):
        yield "a merge towards a centre needs one centre that all share", "set topology: all"
    if isinstance(recipe.merge, Eager) and not (
        isinstance(recipe.schedule, Every) and recipe.schedule.overlap_steps == recipe.schedule.steps
    ):
        yield "merge 'eager' overlaps a whole round", "set schedule: {name: every, steps: H, overlap_steps: H}"
    if isinstance(recipe.merge, Accelerated) and not (
        recipe.payload == "parameters" and isinstance(recipe.topology, Neighbours)
        and isinstance(recipe.schedule, Every | Timer)
    ):
        yield (
            "merge 'accelerated' mixes whole parameters on a graph",
            "set payload: parameters, topology: neighbours, schedule: {name: every, steps: H} or timer",
        )
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


def _allocators(recipe: Recipe) -> Iterator[Refusal]:
    if isinstance(recipe.allocator, TimeBalanced) and not (
        isinstance(recipe.schedule, Every) and recipe.payload != "gradient"
    ):
        yield (
            "allocator 'time-balanced' gives each peer a number of steps per round of its own",
            "set schedule: {name: every, steps: H}, payload: delta",
        )
    if isinstance(recipe.allocator, AdaptiveTopK) and not recipe.compressor.startswith("top"):
        yield (
            f"allocator 'adaptive-topk' chooses how many values {recipe.compressor!r} sends, but that is no top-k",
            "set compressor: top41/4096+fp32",
        )
