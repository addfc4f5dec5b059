"""`atoll.Swarm`: any PyTorch script as a peer. The script keeps its loop, its data and its optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from peer.errors import UserError
from peer.free_weights import unwrapped
from peer.outer.record import RoundRecord
from peer.protocol.address import parse_peer_address
from peer.settings import PeerSettings, known_settings, load_settings
from peer.use.script_peer import ScriptPeer, ScriptStep
from peer.use.script_ranks import Agreement, Call, FollowingRank, ScriptProgress, ranks_of_script

SETTINGS = frozenset((
    "nickname", "identity_path", "host_maddrs", "announce_maddrs", "nat_port_map", "client_mode", "direct",
    "direct_port", "invitation", "run", "run_id", "max_rounds", "max_upload_mbit", "max_download_mbit",
    "monthly_traffic_gb", "save_steps", "save_total_limit", "resume_from_checkpoint",
))  # fmt: skip


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
        model: of the run's manifest, on any one device; under `torchrun` the same on each rank, wrapped in
            `DistributedDataParallel` or divided by `fully_shard`. Its trainable parameters are what the swarm shares.
        optimizer: of the script; its moments are dropped when local progress is.
        output_dir: of this peer: identity, history, checkpoints and logs; no two peers share one.
        settings: those of `atoll join` in SETTINGS, such as `nickname="alice"`.

    Attributes:
        records: of the rounds that this peer saw; rank 0 has them.

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
        self._signals = ExitStack()
        self._part: ScriptPeer | FollowingRank | None = None
        self._progress = ScriptProgress()
        self.records: list[RoundRecord] = []

    def __enter__(self) -> Self:
        if self._part is not None:
            raise UserError("this Swarm is open already", "use one `with` block, or a second Swarm")
        ranks = ranks_of_script(self._model)
        model, self._ranks = unwrapped(self._model), Agreement(ranks)
        part: ScriptPeer | FollowingRank
        if ranks.rank == 0:
            part = ScriptPeer(model, self._optimizer, self._settings, self._ranks, self.records)
            self._progress = part.join(self._addresses)
        else:
            part = FollowingRank(model, self._optimizer, ranks)
            self._progress = part.call()
        self._signals.enter_context(self._ranks.sharing_signals())
        self._part = part
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self._ranks.ranks.count == 1 or self._ranks.stopped:
            self.close()
            return
        part, self._part = self._part, None  # the other ranks are somewhere else
        with self._signals:
            if isinstance(part, ScriptPeer):
                part.abandon()

    def after_step(self, tokens: int, loss: float = 0.0, grad_norm: float = 0.0) -> None:
        """To be called after each `optimizer.step()`, on every rank where there are several.

        Args:
            tokens: what the step trained on, on this rank; a contribution weighs as much as its tokens (or samples).
            loss, grad_norm: where one is not finite, this peer drops what it trained since the last round.
        """
        if tokens < 1:
            raise UserError(f"after_step(tokens={tokens})", "a step trains on at least one token, or sample")
        part = self._open
        tokens, finite = self._ranks.reach(Call.STEP, tokens, math.isfinite(loss) and math.isfinite(grad_norm))
        if isinstance(part, FollowingRank):
            self._progress = part.call()
        else:
            self._progress = part.after_step(ScriptStep(tokens, loss if finite else math.nan, grad_norm))

    @property
    def finished(self) -> bool:
        """The run has reached its last round or token, or this peer its `max_rounds`."""
        return self._seen.finished

    @property
    def round(self) -> int:
        """Rounds of the swarm that the parameters hold."""
        return self._seen.round

    @property
    def step(self) -> int:
        """Steps of this peer, those before it resumed included."""
        return self._seen.step

    @property
    def tokens(self) -> int:
        """That this peer has trained on, before it resumed included."""
        return self._seen.tokens

    @property
    def peers(self) -> int:
        """How many there are in the run."""
        return self._progress.peers

    @property
    def global_step(self) -> float:
        """The swarm's progress in steps of one peer, for schedules of the learning rate."""
        return self._seen.global_step

    def take_result(self) -> None:
        """Put what the run yields so far into the model: the parameters that all peers share. Local progress since the
        last round is not in them, so call it after the last step, on every rank.
        """
        part = self._open
        self._ranks.reach(Call.RESULT)
        self._progress = part.call() if isinstance(part, FollowingRank) else part.take_result()

    def close(self) -> None:
        """Leave, on every rank. Others are not disturbed, and keep what this peer contributed."""
        if self._part is None:
            return
        part, self._part = self._part, None
        with self._signals:
            self._ranks.reach(Call.LEAVE)
            self._progress = part.call() if isinstance(part, FollowingRank) else part.leave()

    @property
    def _open(self) -> ScriptPeer | FollowingRank:
        if self._part is None:
            raise UserError("this Swarm is closed", "use it inside `with atoll.Swarm(...) as swarm:`")
        return self._part

    @property
    def _seen(self) -> ScriptProgress:
        assert self._open is not None
        return self._progress
