"""A trainer whose agent is played by the test."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.local_anchor import InnerParts, LocalAnchor
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Mapped, Start
from peer.link.supervisor import AgentGoneError
from peer.link.sync import SwarmSync
from peer.outer.optim.optimizers import Nesterov
from peer.outer.policy.merge_rules import Carry
from peer.outer.policy.moments import WithMoments
from peer.outer.policy.schedules import Every

NUMEL = 8
STEPS = 4
START = Start(initial_peers=("a",), host_maddrs=("b",), identity_path="key", nickname="alice", directory=".")
MAPPED = Mapped(numel=NUMEL, num_buffers=0)
LINEAGE = "a" * 64
MERGE = Carry()
PUSH = 0.5  # binary fractions: every sum in these tests is exact


@dataclass
class FakeAgent:
    """Stands where `AgentProcess` does; a test plays the agent through `inbox` and `sent`."""

    inbox: deque = field(default_factory=deque)
    sent: list = field(default_factory=list)
    running: bool = True
    dead: bool = False
    may_restart: bool = True
    dies_at_once: bool = False
    starts: int = 1
    ended: list = field(default_factory=list)

    def send(self, message):
        if self.dead:
            raise AgentGoneError("broken pipe")
        self.sent.append(message)

    def receive(self, _timeout_s=0.0):
        if self.inbox:
            return self.inbox.popleft()
        if self.dead:
            raise AgentGoneError("closed")
        return None

    def start(self):
        assert not self.running
        self.running, self.dead = not self.dies_at_once, self.dies_at_once
        self.starts += 1

    def end(self, grace_s):
        self.ended.append(grace_s)
        self.running = False

    def die(self):
        self.dead, self.running = True, False

    def take(self, kind):
        """The messages of one kind sent so far, each handed out once."""
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found


@dataclass(frozen=True)
class Step:
    tokens: int = 10
    loss: float = 2.0
    grad_norm: float = 1.0


class Replica:
    def __init__(self):
        self.flat = torch.full((NUMEL,), 99.0)

    def read(self, out, start=0):
        out.copy_(self.flat[start : start + len(out)])

    def write(self, flat, start=0):
        self.flat[start : start + len(flat)] = flat


class Peer:
    """A `SwarmSync` with everything around it played by the test."""

    def __init__(self, descriptor, merge=MERGE, second=None, moments=None, **limits):
        self.agent, self.replica, self.heard, self.now = FakeAgent(), Replica(), [], 0.0
        self.fresh = []  # steps at which the moments were forgotten
        self.memory = SharedState(descriptor, NUMEL, 2 if moments else 0)
        self.memory.anchor.copy_(torch.arange(NUMEL))
        self.moments = [Replica(), Replica()] if moments else []
        inner = InnerParts(second=second, moments=self.moments)
        local = LocalAnchor(self.memory, self.replica, Nesterov(lr=0.7, momentum=0.9), merge, (), inner)
        schedule = Every(steps=STEPS)
        self.sync = SwarmSync(
            AgentConnection(self.agent, START, MAPPED), local,
            WithMoments(base=schedule, moments=moments) if moments else schedule,
            Limits(rounds_total=limits.get("total"), max_rounds=limits.get("own"), tokens_total=limits.get("tokens")),
            self.heard.append, lambda: self.now, lambda: self.fresh.append(self.sync.step),
        )  # fmt: skip

    def begin(self, round=0):
        self.sync.begin(Anchor(round=round, lineage_id=LINEAGE, contributed=None))
        return self

    def steps(self, count):
        for _ in range(count):
            self.replica.flat += PUSH
            self.sync.after_step(Step())

    def commit(self, shift, contributed, round=1, swarm_tokens=0, fragment=None):
        """The agent moves the anchor and says so."""
        self.memory.anchor += shift
        anchor = Anchor(
            round=round, lineage_id=LINEAGE, contributed=contributed, swarm_tokens=swarm_tokens, fragment=fragment
        )
        self.agent.inbox.append(anchor)
