"""Manifest + settings -> a wired peer. The only place that knows every part."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from peer.data.batches import Batches, DataState
from peer.data.corpus import Corpus, ReadingOptions, Sharing, open_corpus
from peer.data.packing import PackedTokens
from peer.data.shareable import least_shard_tokens
from peer.data.tokenizer import Tokenizer, load_tokenizer
from peer.genesis import build_initial_model
from peer.hub import hub_headers
from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import InnerParts, LocalAnchor
from peer.link.lockstep import LockstepSync
from peer.link.messages import Mapped, Message, Published, Start
from peer.link.supervisor import AgentProcess
from peer.link.sync import SwarmSync
from peer.link.voting import VotingSync
from peer.outer.optim.inner_lr import SETTLED_STEPS, expected_steps, learning_rate
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest
from peer.run.device_checks import log_finding, run_disk_finding
from peer.run.hardware import compute_of, first_device, fitting, plan_in_words
from peer.run.leader import OptimizerState, RanksLoop, begin_leader, trainer_of
from peer.run.local_rule import hook_of, kept_beside, rule_bytes, second_model, trajectory_of
from peer.run.resume import Resumed, read_resumed
from peer.run.shared_model import SharedModel, local_anchor, moments_of, of_all_ranks, replica_of, share
from peer.settings import PeerSettings
from peer.train.compute import Compute, prepare
from peer.train.compute_limit import ComputeLimit
from peer.train.four_bit import in_four_bits
from peer.train.gradient import KeptGradient
from peer.train.model import check_trains, measure_model
from peer.train.optim import Optimizer, build_optimizer
from peer.train.orders import RankLeader, RanksReplica
from peer.train.ranks import ALONE, Ranks
from peer.train.replica import ModelReplica
from peer.train.sharding import place
from peer.train.step import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Training and validation text of this peer. `origin`: what the order of the data depends on, see `Resumed`."""

    tokenizer: Tokenizer
    corpus: Corpus
    batch_sequences: int
    origin: dict[str, Any]

    @property
    def validation(self) -> PackedTokens:
        return self.corpus.validation


@dataclass(frozen=True, kw_only=True)
class Peer:
    """All parts of one peer, wired."""

    settings: PeerSettings
    manifest: RunManifest
    published: Published
    recipe: Recipe
    agent: AgentProcess
    model: PreTrainedModel
    replica: ModelReplica | RanksReplica
    state: OptimizerState
    trainer: Trainer
    batches: Batches
    text: Text
    sync: SwarmSync
    mapped: Mapped


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """The run that the agent found and verified, and what follows from its manifest: resolved once in this process."""

    published: Published
    plan: RunPlan

    @classmethod
    def of(cls, published: Published) -> FoundRun:
        """Raises UserError as `RunPlan.of`."""
        return cls(published=published, plan=RunPlan.of(RunManifest.model_validate(published.manifest)))


def assemble(
    settings: PeerSettings, start: Start, run: FoundRun, agent: AgentProcess,
    on_message: Callable[[Message], None], stopping: Callable[[], bool], ranks: Ranks = ALONE,
) -> Peer:  # fmt: skip
    """Build every part of a peer.

    Args:
        on_message: called with what is to be shown.
        stopping: whether this peer is asked to stop.
        ranks: the devices of this peer, of which this process has the first.

    Raises:
        UserError: the model does not fit, no data, no such device, a checkpoint of another run.
    """
    plan, published = run.plan, run.published
    manifest, recipe = plan.manifest, plan.recipe
    device = first_device(settings)
    tokenizer = load_tokenizer(manifest.tokenizer, settings.output_dir)
    compute = _fitting_compute(settings, plan, tokenizer.vocab_size, device, ranks)
    sharing = Sharing(
        peer_id=published.peer_id, run_seed=manifest.seed,
        least_tokens=least_shard_tokens(manifest, plan.nominal_tokens),
    )  # fmt: skip
    text = load_text(settings, manifest, tokenizer, published.peer_id, stopping, sharing)
    model, again, shared, leader, resumed = _placed_model(settings, plan, tokenizer, agent, compute, device)
    optimizer = _optimizer(model, plan, shared.layout, compute, leader)
    inner, rounds = recipe.inner_settings(manifest.inner), manifest.rounds
    hook, again = hook_of(recipe.local, model, shared.layout, optimizer, inner, compute, again)
    second = trajectory_of(recipe.local, shared.layout, again, lambda one: replica_of(shared.layout, one, leader, 1))
    moments = moments_of(recipe, model, shared.layout, optimizer, leader, 1 + (again is not None))
    loop = hook if leader is None else RanksLoop(leader, hook)
    local = local_anchor(shared, recipe, device, InnerParts(loop=loop, second=second, moments=moments))
    state = OptimizerState(optimizer, leader)
    limits = Limits(
        rounds_total=rounds.total, tokens_total=rounds.tokens_total, max_rounds=settings.max_rounds, stopping=stopping
    )
    # a restarted agent joins this run and no other
    start = start.model_copy(update={"run_id": manifest.run_id})
    connection = AgentConnection(agent, start, shared.mapped)
    sync = _synchroniser(connection, recipe, local, (optimizer, state.reset), limits, on_message)
    if resumed is not None:
        _resume(resumed, recipe, state, sync)
    hook.limit = ComputeLimit.of(recipe.straggler.timeout, device, recipe.gradients_per_step)
    rate = rate_of(plan, sync, resumed is not None)
    trainer = trainer_of(leader, model.train(), optimizer, inner, rate, hook=hook, compute=compute)
    return Peer(
        settings=settings, manifest=manifest, published=published, recipe=recipe, agent=agent, model=model,
        replica=shared.replica, state=state, trainer=trainer, text=text, sync=sync,
        batches=_batches(text, resumed, sync, stopping), mapped=shared.mapped,
    )  # fmt: skip


def _fitting_compute(
    settings: PeerSettings, plan: RunPlan, vocab_size: int, device: torch.device, ranks: Ranks
) -> Compute:
    """How this peer computes, once the model fits; says what a step will use. Raises UserError where it does not."""
    manifest = plan.manifest
    size, rule = measure_model(manifest.model, vocab_size), rule_bytes(plan.recipe, device)
    compute = fitting(compute_of(settings, plan, ranks), size, manifest.data.sequence_length, device, rule)
    log.info("%s", plan_in_words(manifest, size, device, compute, rule))
    log_finding(run_disk_finding(settings, plan, size.trained).require())
    return compute


def _placed_model(
    settings: PeerSettings, plan: RunPlan, tokenizer: Tokenizer, agent: AgentProcess, compute: Compute,
    device: torch.device,
) -> tuple[PreTrainedModel, PreTrainedModel | None, SharedModel, RankLeader | None, Resumed | None]:  # fmt: skip
    """The model on its devices, once it has made a step; a second one, where the ranks share it and a rule replays;
    what of it is shared with the agent; the lead of further ranks; and the checkpoint that it continues.
    """
    manifest, recipe, ranks = plan.manifest, plan.recipe, compute.ranks
    model = build_initial_model(manifest, tokenizer)
    if compute.four_bit:
        model = in_four_bits(model, manifest.model, device, compute.precision)
    numel, kept = FlatLayout.of(model).numel, kept_beside(recipe)
    resumed = read_resumed(settings, manifest, numel, recipe.optimizer.num_buffers, kept)
    shared = share(agent, model, recipe, resumed)
    leader = begin_leader(settings, manifest, tokenizer.vocab_size, compute, model) if ranks.count > 1 else None
    if not ranks.sharded:
        place(model, device, ranks)
    document_end = tokenizer.eos_id if manifest.data.document_mask else None
    check_trains(manifest.model, model, manifest.data.sequence_length, document_end)
    again = second_model(recipe, model, device, ranks)
    if ranks.sharded:  # only now: one rank alone cannot make a step of a model that is cut
        place(model, device, ranks)
    prepare(model, compute)
    return model, again, of_all_ranks(shared, leader, model, agent, resumed), leader, resumed


def _resume(resumed: Resumed, recipe: Recipe, state: OptimizerState, sync: SwarmSync) -> None:
    if recipe.payload != "gradient":  # then the outer optimizer makes the steps
        state.load(resumed.tensors["optimizer"])
    sync.resume(resumed.state["progress"], resumed.tensors.get("second", {}))


def _synchroniser(
    agent: AgentConnection, recipe: Recipe, local: LocalAnchor, inner: tuple[Optimizer, Callable[[], None]],
    limits: Limits, on_message: Callable[[Message], None],
) -> SwarmSync:  # fmt: skip
    """`inner`: the optimizer, and what lets it begin with an empty state."""
    optimizer, reset = inner
    parts: dict[str, Any] = {
        "agent": agent, "local": local, "limits": limits, "on_message": on_message, "on_drop": reset,
    }  # fmt: skip
    if recipe.votes is not None:
        return VotingSync(recipe.votes, **parts)
    if isinstance(optimizer, KeptGradient):
        return LockstepSync(optimizer, schedule=recipe.rounds, **parts)
    return SwarmSync(schedule=recipe.rounds, **parts)


def _optimizer(
    model: PreTrainedModel, plan: RunPlan, layout: FlatLayout, compute: Compute, leader: RankLeader | None
) -> Optimizer:
    """The inner optimizer of a model that is on its device."""
    recipe = plan.recipe
    if recipe.payload != "gradient":
        return build_optimizer(model, recipe.inner_settings(plan.manifest.inner), compute.eight_bit)
    kept = KeptGradient(model, layout, scaled=recipe.accumulates, ranks=compute.ranks)
    if leader is not None and leader.ranks.sharded:
        kept.parts = RanksReplica(leader, kept.own, number=1)
    return kept


def _batches(text: Text, resumed: Resumed | None, sync: SwarmSync, stopping: Callable[[], bool]) -> Batches:
    state = DataState.from_dict(resumed.state["data"]) if resumed and resumed.continues(text.origin) else None

    def waiting(seconds: float) -> bool:
        sync.poll(timeout_s=seconds)
        return stopping() or sync.finished

    return Batches(text.corpus.sources, text.batch_sequences, text.origin["data_seed"], state, waiting)


def load_text(
    settings: PeerSettings, manifest: RunManifest, tokenizer: Tokenizer, peer_id: str,
    stopping: Callable[[], bool] = lambda: False, sharing: Sharing | None = None,
) -> Text:  # fmt: skip
    """The corpus of this peer, open."""
    batch = manifest.inner.batch_sequences
    options = ReadingOptions(
        train_files=settings.train_files, validates=settings.eval_every_rounds > 0,
        cache=settings.output_dir / "cache" / "segments", cache_bytes=int(settings.data_cache_gb * 1e9),
        workers=settings.data_workers, hub_headers=hub_headers(), private_urls=settings.private_urls,
        sharing=sharing,
    )  # fmt: skip
    corpus = open_corpus(manifest.data, tokenizer, options, batch, stopping)
    return Text(
        tokenizer=tokenizer,
        corpus=corpus,
        batch_sequences=batch,
        origin={
            "text": corpus.digest,
            "tokenizer": corpus.tokens_digest,
            "batch_sequences": batch,
            "data_seed": settings.data_seed if settings.data_seed is not None else _seed_of(peer_id),
        },
    )


def rate_of(plan: RunPlan, sync: SwarmSync, resumed: bool) -> Callable[[], float]:
    """The rate of the next step, from the swarm's progress: a peer that joins or resumes has the right one at once. It
    ends where the organiser has last said that the run ends.
    """
    manifest, recipe, shared = plan.manifest, plan.recipe, plan.rate
    if shared is not None:
        assert isinstance(sync, LockstepSync)
        return lambda: shared(sync.rounds_before)

    def rate() -> float:
        fresh_since = SETTLED_STEPS if resumed and not sync.drops else sync.steps_since_fresh
        steps, rounds, tokens = math.inf, sync.limits.rounds_total, sync.limits.tokens_total
        if rounds is not None and recipe.votes is None:  # of rounds that are called for, the number of steps is unknown
            steps = float(recipe.rounds.begins(rounds + 1))
        if tokens is not None:
            begun = recipe.rounds.begins(sync.round + 1)
            steps = min(steps, expected_steps(manifest.tokens_per_step, tokens, sync.swarm_tokens, begun))
        return learning_rate(manifest.inner, sync.global_step, steps if steps < math.inf else None, fresh_since)

    return rate


def _seed_of(peer_id: str) -> int:
    """Every peer reads the text in its own order."""
    return int.from_bytes(peer_id.encode()[-8:], "big") % 2**31
