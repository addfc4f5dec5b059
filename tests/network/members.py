"""One peer of a test swarm: a production agent and `SwarmSync`, and a trainer whose "model" is a vector."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.link.local_anchor import LocalAnchor
from peer.link.memory import Head, SharedState
from peer.link.messages import LivePeers, Message, RoundEnded, Start, Stop, Stopped
from peer.link.supervisor import AgentProcess
from peer.link.sync import SwarmSync
from peer.link.voting import VotingSync
from peer.outer.policy.schedules import GradientChange
from peer.outer.recipe.recipe import Recipe
from peer.outer.record import RoundRecord

TOKENS_PER_STEP = 32


@dataclass(frozen=True)
class FakeStep:
    tokens: int = TOKENS_PER_STEP
    loss: float = 1.0
    grad_norm: float = 1.0


class VectorReplica:
    """The "model": one vector."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def read(self, out: Tensor, start: int = 0) -> None:
        out.copy_(self.flat[start : start + out.numel()])

    def write(self, flat: Tensor, start: int = 0) -> None:
        self.flat[start : start + flat.numel()].copy_(flat)


@dataclass
class Member:
    """One peer of a test swarm."""

    name: str
    folder: Path
    agent: AgentProcess
    start: Start
    push: Tensor
    sync: SwarmSync | None = None
    replica: VectorReplica | None = None
    peer_id: str = ""
    run_id: str = ""
    maddrs: tuple[str, ...] = ()
    client: bool = False
    records: list[RoundRecord] = field(default_factory=list)
    swarm: LivePeers | None = None
    stopped: Stopped | None = None
    frozen: bool = False
    pace: int = 1
    grad_norm: float = 1.0
    waits: bool = False  # makes no step between a snapshot and its round

    @property
    def committed(self) -> list[RoundRecord]:
        return [record for record in self.records if record.status == "committed"]

    @property
    def recorded(self) -> int:
        """The last round whose record it has read; its agent changes the head before it reports."""
        return self.committed[-1].round if self.committed else 0

    @property
    def head(self) -> Head | None:
        assert self.sync is not None
        return self.sync.memory.head

    @property
    def lineage_id(self) -> str | None:
        head = self.head
        return head.lineage_id if head is not None else None

    @property
    def round(self) -> int:
        assert self.sync is not None
        return self.sync.round

    @property
    def at_rest(self) -> bool:
        """It has merged the newest state, and its agent has nothing to average: no round begins before it steps."""
        assert self.sync is not None
        head = self.head
        return head is not None and head.round == self.sync.round and not self.in_round

    @property
    def in_round(self) -> bool:
        """Its agent has a snapshot that is not averaged yet."""
        assert self.sync is not None
        return self.sync._ledger.outstanding is not None and self.sync._held is None

    def local(self, memory: SharedState, recipe: Recipe, fragments: Sequence[int]) -> LocalAnchor:
        """What it trains."""
        self.replica = VectorReplica(torch.empty_like(memory.anchor))
        return LocalAnchor(memory, self.replica, recipe.optimizer, recipe.late_merge, fragments)

    def synchroniser(self, recipe: Recipe, parts: dict[str, Any]) -> SwarmSync:
        """What keeps it in the swarm."""
        if isinstance(recipe.schedule, GradientChange):
            return VotingSync(recipe.schedule, **parts)
        return SwarmSync(schedule=recipe.rounds, **parts)

    def on_message(self, message: Message) -> None:
        if isinstance(message, RoundEnded):
            self.records.append(message.record)
        elif isinstance(message, LivePeers):
            self.swarm = message
        elif isinstance(message, Stopped):
            self.stopped = message

    def step(self) -> None:
        """One inner "step": the vector moves by `push`."""
        assert self.sync is not None
        assert self.replica is not None
        self.replica.flat += self.push
        self.sync.after_step(FakeStep(grad_norm=self.grad_norm))

    def log_text(self) -> str:
        return (self.folder / "agent.log").read_text()

    def kill(self) -> None:
        """SIGKILL the agent alone, as a crash; the test plays the trainer, so nothing else is left of this member."""
        assert self.agent.pid is not None
        os.kill(self.agent.pid, signal.SIGKILL)
        self.frozen = True

    def stop(self, linger_s: float = 0.0) -> Stopped:
        self.agent.send(Stop(linger_s=linger_s))
        message = self.agent.expect(Stopped, 15.0 + linger_s)
        assert isinstance(message, Stopped)
        self.agent.end(5.0)
        return message
