"""`atoll.Swarm`: any PyTorch script as a peer. The script keeps its loop, its data and its optimizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from peer.checkpoint.writer import CheckpointWriter
from peer.data.batches import DataState
from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError
from peer.free_weights import layout_of
from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.messages import Anchor, LivePeers, Message, Published, RoundEnded, Saved, Stop, Stopped, TokenizerFetched
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.link.sync import SwarmSync
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import RoundRecord
from peer.outer.state.flat_layout import FlatLayout, trained_parameters
from peer.protocol.address import PeerAddress, parse_peer_address
from peer.run.assemble import plan_of
from peer.run.checkpointing import Inner, Saving, inner_half
from peer.run.join import LOCK_NAME
from peer.run.lifecycle import DRAIN_S, LINGER_S, PUBLISHED_TIMEOUT_S, STATE_TIMEOUT_S, start_message
from peer.run.local_rule import kept_beside
from peer.run.resume import checkpoint_folder, read_resumed
from peer.run.run_file import keep_manifest
from peer.run.shared_model import local_anchor, share
from peer.settings import PeerSettings, known_settings, load_settings
from peer.swarm.net.keys import check_identity
from peer.swarm.net.socket_folder import open_socket_folder
from peer.system.file_lock import lock_folder
from peer.system.preflight import check_output_dir, check_reachable, lock_identity
from peer.train.hook import StepHook
from peer.train.model import build_skeleton
from peer.use.script_state import load_state_tensors, state_tensors

log = logging.getLogger(__name__)
SETTINGS = frozenset((
    "nickname", "identity_path", "host_maddrs", "announce_maddrs", "nat_port_map", "client_mode", "direct",
    "direct_port", "run_id", "max_rounds", "max_upload_mbit", "max_download_mbit", "monthly_traffic_gb", "save_steps",
    "save_total_limit", "resume_from_checkpoint",
))  # fmt: skip


@dataclass(frozen=True)
class _ScriptStep:
    tokens: int
    loss: float
    grad_norm: float


class Swarm:
    """The swarm of a run, for the loop of a script:

        with atoll.Swarm(address, model, optimizer) as swarm:
            for batch in batches:
                ...  # forward, loss.backward(), optimizer.step(), optimizer.zero_grad()
                swarm.after_step(tokens=batch.numel(), loss=loss.item())
                if swarm.finished:
                    break

    On entry the trainable parameters take the swarm's current values; `after_step` hands progress over and takes new
    values up, without waiting for the network. On exit from a run that is finished they hold what the run yields.

    Args:
        address: of the bootstrap, or of any peer; several are tried in order.
        model: of the run's manifest, on any one device. Its trainable parameters are what the swarm shares.
        optimizer: of the script; its moments are dropped when local progress is.
        output_dir: of this peer: identity, history, checkpoints and logs; no two peers share one.
        settings: those of `atoll join` in SETTINGS, such as `nickname="alice"`.

    Attributes:
        records: of the rounds that this peer saw.
        peers: how many there are in the run.

    Raises:
        UserError: no run there, another model, or a recipe that needs the training loop of `atoll join`.
    """

    def __init__(
        self, address: str | list[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
        output_dir: str | os.PathLike[str] = "runs/peer", **settings: Any,
    ) -> None:  # fmt: skip
        self._addresses = [parse_peer_address(one) for one in ([address] if isinstance(address, str) else address)]
        self._model, self._optimizer = model, optimizer
        if others := sorted(settings.keys() & known_settings().keys() - SETTINGS):
            what = f"atoll.Swarm does not accept {', '.join(others)}: the script owns the training loop"
            raise UserError(what, f"leave it out; the settings of a script's peer are {', '.join(sorted(SETTINGS))}")
        given: Mapping[str, Any] = {"output_dir": Path(output_dir), **settings}
        self._settings: PeerSettings = load_settings(given, None, os.environ)
        self._closing = ExitStack()
        self._agent: AgentProcess | None = None
        self._joined: SwarmSync | None = None
        self._saving: Saving | None = None
        self._steps_per_round = 0
        self.records: list[RoundRecord] = []
        self.peers = 0

    def __enter__(self) -> Self:
        if self._joined is not None:
            raise UserError("this Swarm is open already", "use one `with` block, or a second Swarm")
        with self._closing:  # what has begun ends if joining fails
            joined = self._join()
            self._closing = self._closing.pop_all()
        self._joined = joined
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def after_step(self, tokens: int, loss: float = 0.0, grad_norm: float = 0.0) -> None:
        """To be called after each `optimizer.step()`.

        Args:
            tokens: what the step trained on; a contribution weighs as much as its tokens (or samples).
            loss, grad_norm: where one is not finite, this peer drops what it trained since the last round.
        """
        if tokens < 1:
            raise UserError(f"after_step(tokens={tokens})", "a step trains on at least one token, or sample")
        sync = self._sync
        sync.after_step(_ScriptStep(tokens, loss, grad_norm))
        if self._saving is not None and sync.step % self._settings.save_steps == 0:
            self._saving.ask_in_passing(sync.step)

    @property
    def finished(self) -> bool:
        """The run has reached its last round or token, or this peer its `max_rounds`."""
        return self._sync.finished

    @property
    def round(self) -> int:
        """Rounds of the swarm that the parameters hold."""
        return self._sync.round

    @property
    def step(self) -> int:
        """Steps of this peer, those before it resumed included."""
        return self._sync.step

    @property
    def tokens(self) -> int:
        """That this peer has trained on, before it resumed included."""
        return self._sync.tokens

    @property
    def global_step(self) -> float:
        """The swarm's progress in steps of one peer, for schedules of the learning rate."""
        return self._sync.global_step

    def take_result(self) -> None:
        """Put what the run yields so far into the model: the parameters that all peers share. Local progress since the
        last round is not in them, so call it after the last step.
        """
        self._replica.write(self._sync.result)

    def close(self) -> None:
        """Leave. Others are not disturbed, and keep what this peer contributed."""
        if self._joined is None or self._agent is None:
            return
        sync, agent = self._joined, self._agent
        with self._closing:  # a second Ctrl-C does not wait for the agent's farewell
            if self._saving is not None:
                num_bytes = 4 * self._mapped.numel * (1 + self._mapped.num_buffers)
                self._saving.last(sync.step, num_bytes, lambda s: sync.poll(timeout_s=s))
                self._saving.close()
            self._joined = self._saving = None
            if sync.finished:
                self._replica.write(sync.result)
            try:
                agent.send(Stop(linger_s=LINGER_S if sync.finished else 0.0))
                agent.expect(Stopped, LINGER_S + 5.0 if sync.finished else DRAIN_S)
            except (AgentGoneError, UserError) as gone:
                log.warning("the agent left without its figures: %s", gone)

    @property
    def _sync(self) -> SwarmSync:
        if self._joined is None:
            raise UserError("this Swarm is closed", "use it inside `with atoll.Swarm(...) as swarm:`")
        return self._joined

    def _join(self) -> SwarmSync:
        settings = self._settings
        open_socket_folder()
        check_output_dir(settings.output_dir)
        identity_path = settings.identity_path or settings.output_dir / "identity.key"
        self._closing.enter_context(lock_identity(identity_path))
        self._closing.enter_context(lock_folder(settings.output_dir, "output_dir", LOCK_NAME))
        check_identity(identity_path)
        reachable: list[PeerAddress] = check_reachable(self._addresses)
        self._agent = agent = AgentProcess(settings.output_dir / "agent.log")
        self._closing.callback(agent.close)
        agent.start()
        start = start_message(settings, reachable, identity_path)
        agent.send(start)
        published: Published = agent.expect(Published, PUBLISHED_TIMEOUT_S)
        plan = plan_of(published)
        if plan.manifest.tokenizer.files:
            agent.expect(TokenizerFetched, STATE_TIMEOUT_S)
        _check_recipe(plan.recipe)
        layout, buffers = self._layout(plan), plan.recipe.optimizer.num_buffers
        resumed = read_resumed(settings, plan.manifest, layout.numel, buffers, kept_beside(plan.recipe))
        shared = share(agent, self._model, plan.recipe, resumed, layout)
        self._replica, self._mapped = shared.replica, shared.mapped
        device = next(iter(trained_parameters(self._model).values())).device
        local = local_anchor(shared, plan.recipe, device, StepHook())
        rounds = plan.manifest.rounds
        connection = AgentConnection(
            agent, start.model_copy(update={"run_id": plan.manifest.run_id}), shared.mapped
        )
        sync = SwarmSync(
            connection, local, plan.recipe.rounds,
            Limits(total_rounds=rounds.total, tokens_total=rounds.tokens_total, max_rounds=settings.max_rounds),
            self._on_message, on_drop=self._optimizer.state.clear,
        )  # fmt: skip
        if resumed is not None:
            load_state_tensors(self._optimizer, resumed.tensors["optimizer"])
            sync.resume(resumed.state["progress"], resumed.tensors.get("second", {}))
        agent.send(shared.mapped)
        sync.begin(agent.expect(Anchor, STATE_TIMEOUT_S))
        if settings.save_steps:
            folder = checkpoint_folder(settings.output_dir, plan.manifest.run_id)
            keep_manifest(folder, plan.manifest)
            writer = CheckpointWriter(folder, settings.save_total_limit)
            self._saving = Saving(agent, writer, partial(self._inner_state, sync, plan.manifest.run_id))
        log.info("joined run %s (%s) at round %d", plan.manifest.name, plan.manifest.run_id[:16], sync.round)
        return sync

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

    def _inner_state(self, sync: SwarmSync, run_id: str, saved: Saved) -> Inner:
        """As that of `atoll join`, but for the data, which is the script's own."""
        optimizer = state_tensors(self._optimizer)
        return inner_half(sync, self._replica, optimizer, saved, run_id, DataState(seed=0).to_dict(), {})

    def _on_message(self, message: Message) -> None:
        if isinstance(message, RoundEnded):
            self.records.append(message.record)
        elif isinstance(message, LivePeers):
            self.peers = len(message.peers)
        elif isinstance(message, Saved) and self._saving is not None:
            self._saving.answered(message, self._sync.step, self._sync.round)


def _check_recipe(recipe: Recipe) -> None:
    """Raise UserError where a recipe changes steps themselves, which are the script's."""
    if recipe.payload != "delta" or recipe.votes is not None or recipe.local.replays or recipe.local.reads_anchor:
        raise UserError(
            f"recipe {recipe.name} changes the steps of a peer, and so needs the training loop of `atoll join`",
            "ask the organiser for one that exchanges what several steps made, such as diloco or lagoon",
        )
