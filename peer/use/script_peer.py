"""The peer of a script: its agent, its place in the run, its checkpoints. Where there are several ranks, on rank 0."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from peer.checkpoint.writer import CheckpointWriter
from peer.data.batches import DataState
from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError
from peer.free_weights import layout_of
from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import InnerParts
from peer.link.messages import (
    Anchor,
    LivePeers,
    Message,
    Notice,
    Published,
    RoundEnded,
    Saved,
    Stop,
    Stopped,
    TokenizerFetched,
)
from peer.link.shared_vectors import SharedVectors
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.link.sync import SwarmSync
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import RoundRecord
from peer.outer.state.flat_layout import FlatLayout, trained_parameters
from peer.protocol.address import PeerAddress
from peer.protocol.invitation import ASK
from peer.run.assemble import FoundRun
from peer.run.checkpointing import Inner, Saving, inner_half
from peer.run.join import LOCK_NAME
from peer.run.lifecycle import DRAIN_S, LINGER_S, PUBLISHED_TIMEOUT_S, STATE_TIMEOUT_S
from peer.run.local_rule import kept_beside
from peer.run.resume import checkpoint_folder, read_resumed
from peer.run.run_file import keep_manifest
from peer.run.shared_model import local_anchor, of_all_ranks, share
from peer.run.start_message import start_message
from peer.settings import PeerSettings
from peer.swarm.net.keys import check_identity
from peer.swarm.net.socket_folder import open_socket_folder
from peer.system.file_lock import lock_folder
from peer.system.preflight import check_output_dir, check_reachable, lock_identity
from peer.train.hook import StepHook
from peer.train.model import build_skeleton
from peer.train.orders import RankLeader, RankOrder, send_tensors
from peer.use.script_ranks import Agreement, ScriptProgress, say_layout, whole_state
from peer.use.script_state import load_state_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScriptStep:
    """A `StepReport`."""

    tokens: int
    loss: float
    grad_norm: float


class ScriptPeer:
    """Whatever it does that concerns the other ranks, it does while they follow, and then says that it is done.

    Args:
        model: not wrapped.
        agreement: of the ranks that train it, this one first.

    Attributes:
        records: of the rounds that this peer saw.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: PeerSettings,
        agreement: Agreement, records: list[RoundRecord],
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._settings, self.records = model, optimizer, settings, records
        self._agreement, ranks = agreement, agreement.ranks
        self._leader = RankLeader(ranks, SharedVectors()) if ranks.count > 1 else None
        self._closing = ExitStack()
        self._saving: Saving | None = None
        self._peers = 0

    def join(self, addresses: Sequence[PeerAddress]) -> ScriptProgress:
        """The trainable parameters take the swarm's values."""
        with self._leading(), self._closing:  # what has begun ends if joining fails
            self._arrive(addresses)
            self._closing = self._closing.pop_all()
            return self._done()

    def after_step(self, step: ScriptStep) -> ScriptProgress:
        """Of all ranks."""
        with self._leading():
            self._sync.after_step(step)
            if self._saving is not None and self._sync.step % self._settings.save_steps == 0:
                self._saving.ask_in_passing(self._sync.step)
            return self._done()

    def take_result(self) -> ScriptProgress:
        """See `Swarm`."""
        with self._leading():
            self._shared.replica.write(self._sync.result)
            return self._done()

    def leave(self) -> ScriptProgress:
        """Write a last checkpoint, or put what the run yields into the model, and say farewell.

        Raises:
            UserError: this peer is no longer invited.
        """
        sync = self._sync
        with self._closing:  # a second Ctrl-C does not wait for the agent's farewell
            with self._leading():
                if self._saving is not None:
                    num_bytes = 4 * self._shared.mapped.numel * (1 + self._shared.mapped.num_buffers)
                    self._saving.last(sync.step, num_bytes, lambda s: sync.poll(timeout_s=s))
                    self._saving.close()
                    self._saving = None
                if sync.finished:
                    self._shared.replica.write(sync.result)
                progress = self._done()
            self._say_farewell(LINGER_S if sync.finished else 0.0)
        if sync.expelled:
            raise UserError(f"this peer {sync.expelled}", ASK)
        return progress

    def abandon(self) -> None:
        """Leave without the other ranks."""
        with self._closing:
            self._say_farewell(0.0)

    def _say_farewell(self, linger_s: float) -> None:
        try:
            self._agent.send(Stop(linger_s=linger_s))
            self._agent.expect(Stopped, linger_s + 5.0 if linger_s else DRAIN_S)
        except (AgentGoneError, UserError) as gone:
            log.warning("the agent left without its figures: %s", gone)

    @contextmanager
    def _leading(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._leader is not None:
                with contextlib.suppress(RuntimeError):
                    self._leader.order(RankOrder.STOP)
            raise

    def _done(self) -> ScriptProgress:
        sync = self._sync
        progress = ScriptProgress(sync.finished, sync.round, sync.step, sync.tokens, self._peers, sync.global_step)
        if self._leader is not None:
            self._leader.order(RankOrder.DONE, *progress.numbers())
        return progress

    def _arrive(self, addresses: Sequence[PeerAddress]) -> None:
        settings = self._settings
        identity_path = self._take_identity()
        reachable = check_reachable(addresses)
        self._agent = agent = AgentProcess(settings.output_dir / "agent.log")
        self._closing.callback(agent.close)
        agent.start()
        start = start_message(settings, reachable, identity_path)
        agent.send(start)
        plan = FoundRun.of(agent.expect(Published, PUBLISHED_TIMEOUT_S)).plan
        if plan.manifest.tokenizer.files:
            agent.expect(TokenizerFetched, STATE_TIMEOUT_S)
        check_recipe(plan.recipe)
        layout, buffers = self._layout(plan), plan.recipe.optimizer.num_buffers
        resumed = read_resumed(settings, plan.manifest, layout.numel, buffers, kept_beside(plan.recipe))
        if self._leader is not None:
            say_layout(self._leader, layout)
        shared = share(agent, self._model, plan.recipe, resumed, layout)
        self._shared = of_all_ranks(shared, self._leader, self._model, agent, resumed)
        if self._leader is not None and resumed is None:
            self._shared.replica.read(shared.memory.anchor)  # the genesis, if the script builds it
        start = start.model_copy(update={"run_id": plan.manifest.run_id})
        self._sync = sync = self._synchroniser(AgentConnection(agent, start, shared.mapped), plan)
        if resumed is not None:
            self._load(resumed.tensors["optimizer"])
            sync.resume(resumed.state["progress"], resumed.tensors.get("second", {}))
        agent.send(shared.mapped)
        sync.begin(agent.expect(Anchor, STATE_TIMEOUT_S))
        if settings.save_steps:
            folder = checkpoint_folder(settings.output_dir, plan.manifest.run_id)
            keep_manifest(folder, plan.manifest)
            writer = CheckpointWriter(folder, settings.save_total_limit)
            self._saving = Saving(agent, writer, partial(self._inner_state, plan.manifest.run_id))
        log.info("joined run %s (%s) at round %d", plan.manifest.name, plan.manifest.run_id[:16], sync.round)

    def _take_identity(self) -> Path:
        settings = self._settings
        open_socket_folder()
        check_output_dir(settings.output_dir)
        path = settings.identity_path or settings.output_dir / "identity.key"
        self._closing.enter_context(lock_identity(path))
        self._closing.enter_context(lock_folder(settings.output_dir, "output_dir", LOCK_NAME))
        check_identity(path)
        return path

    def _synchroniser(self, connection: AgentConnection, plan: RunPlan) -> SwarmSync:
        device = next(iter(trained_parameters(self._model).values())).device
        rounds = plan.manifest.rounds
        limits = Limits(
            rounds_total=rounds.total, tokens_total=rounds.tokens_total, max_rounds=self._settings.max_rounds,
            stopping=lambda: self._agreement.signalled,
        )
        local = local_anchor(self._shared, plan.recipe, device, InnerParts(loop=StepHook()))
        return SwarmSync(connection, local, plan.recipe.rounds, limits, self._on_message, on_drop=self._drop_state)

    def _layout(self, plan: RunPlan) -> FlatLayout:
        """Of the trainable parameters, which must be those of the run."""
        spec = plan.manifest.model
        if spec.of_a_script:
            layout = layout_of(self._model)
            if layout.digest() != spec.layout:
                raise UserError(
                    f"this model is not that of run {plan.manifest.name}: its {len(layout.names)} trainable parameters "
                    f"({layout.numel:,} values) have other names or shapes", "build the model as the organiser does",
                )  # fmt: skip
            return layout
        vocab_size = load_tokenizer(plan.manifest.tokenizer, self._settings.output_dir).vocab_size
        wanted = FlatLayout.of(build_skeleton(spec, vocab_size), plan.recipe.cut)
        own = {name: tuple(one.shape) for name, one in trained_parameters(self._model).items()}
        named = dict(zip(wanted.names, wanted.shapes, strict=True))
        if own != named:
            name = min(own.keys() ^ named.keys() or {name for name in own if own[name] != named[name]})
            raise UserError(
                f"this model is not that of run {plan.manifest.name}: {name} has shape {own.get(name, 'none')}, the "
                f"run's {named.get(name, 'none')}", "build it with the architecture and config of the manifest",
            )  # fmt: skip
        return wanted

    def _drop_state(self) -> None:
        if self._leader is not None:
            self._leader.order(RankOrder.RESET)
        self._optimizer.state.clear()

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        load_state_tensors(self._optimizer, tensors)  # which refuses what does not fit
        if self._leader is not None:
            self._leader.order(RankOrder.LOAD)
            send_tensors(self._leader.ranks, tensors)

    def _inner_state(self, run_id: str, saved: Saved) -> Inner:
        """As that of `atoll join`, but for the data, which is the script's own."""
        if self._leader is not None and self._leader.ranks.sharded:
            self._leader.order(RankOrder.GATHER)
        optimizer = dict(whole_state(self._optimizer))
        data = DataState(seed=0).to_dict()
        return inner_half(self._sync, self._shared.replica, optimizer, saved, run_id, data, {})

    def _on_message(self, message: Message) -> None:
        if isinstance(message, RoundEnded):
            self.records.append(message.record)
        elif isinstance(message, LivePeers):
            self._peers = len(message.peers)
        elif isinstance(message, Notice):
            log.warning("%s", message.text)
        elif isinstance(message, Saved) and self._saving is not None:
            self._saving.answered(message, self._sync.step, self._sync.round)


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError where a recipe changes steps themselves, which are the script's."""
    rule, own = recipe.local, recipe.payload == "delta" and recipe.votes is None and recipe.straggler.timeout is None
    if not own or rule.replays or rule.reads_anchor or recipe.moments is not None:
        raise UserError(
            f"recipe {recipe.name} changes the steps of a peer, and so needs the training loop of `atoll join`",
            "ask the organiser for one that exchanges what several steps made, such as diloco or lagoon",
        )
