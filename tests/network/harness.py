"""Real swarms for tests: real bootstrap, agents, DHT and sockets. Only the inner training is replaced by arithmetic.

A `Member` is the production `SwarmSync` over a production agent process; its "model" is a vector that moves by a known
amount at every step, so that a test can compute what the swarm must arrive at.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.link.agent_connection import AgentConnection
from peer.link.limits import Limits
from peer.link.memory import Head, SharedState
from peer.link.messages import Anchor, Mapped, Published, Start
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.outer.recipe.plan import RunPlan
from peer.protocol.line_limits import LineLimits
from peer.protocol.manifest import RunManifest
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.forked import ForkedAgent
from tests.network.members import Member


class TestSwarm:
    """Starts, drives and cleans up bootstraps and members."""

    __test__ = False

    def __init__(
        self, folder: Path, *, hidden: int = 16, steps: int = 5, wait: float = 5.0, total: int | None = None,
        recipe: str = DILOCO, min_group: int = 2, layers: int = 1,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.shapes: tuple[tuple[int, ...], ...] | None = None  # of the "model"; one vector
        rounds = f", min_group: {min_group}" + (f", total: {total}" if total else "")
        text = MANIFEST.format(hidden=hidden, recipe=recipe, steps=steps, wait=wait, total=rounds)
        self.manifest_text = text.replace("num_hidden_layers: 1", f"num_hidden_layers: {layers}")
        self.bootstraps: list[BootstrapProcess] = []
        self.members: list[Member] = []
        self.kind: Callable[..., Member] = Member
        self.limits: dict[str, LineLimits] = {}
        self._turns = 0

    def bootstrap(self, name: str = "bootstrap", initial_peers: Sequence[str] = (), port: int = 0) -> BootstrapProcess:
        self.folder.mkdir(exist_ok=True)
        self.bootstraps.append(self._start_bootstrap(self.folder / name, initial_peers, port))
        return self.bootstraps[-1]

    def _start_bootstrap(self, folder: Path, initial_peers: Sequence[str], port: int) -> BootstrapProcess:
        return BootstrapProcess(folder, self.manifest_text, initial_peers, port)

    def add(self, *names: str, address: str | None = None, genesis: Tensor | None = None) -> list[Member]:
        """Start members together and bring each to its first anchor."""
        bootstrap = self.bootstraps[-1]
        address = address or bootstrap.address
        members = [self._launch(name, address, len(self.members) + index) for index, name in enumerate(names)]
        self.members += members
        for member in members:
            self._connect(member, bootstrap.genesis() if genesis is None else genesis, bootstrap.fragments())
        for member in members:
            assert member.sync is not None
            anchor = member.agent.expect(Anchor, 60.0)
            assert isinstance(anchor, Anchor)
            member.sync.begin(anchor)
        return members

    def _launch(self, name: str, address: str, number: int) -> Member:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        agent = self._agent(folder)
        start = self._start_of(name, address, folder)
        self._start_agent(name, agent)
        agent.send(start)
        return self.kind(name, folder, agent, start, push=torch.zeros(1) + 1e-3 * (number + 1))

    def _start_of(self, name: str, address: str, folder: Path) -> Start:
        return Start(
            initial_peers=(address,),
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            identity_path=str(folder / "identity.key"),
            nickname=name,
            directory=str(folder),
            limits=self.limits.get(name, LineLimits()),
        )

    def _start_agent(self, name: str, agent: AgentProcess) -> None:  # noqa: ARG002
        agent.start()

    def _agent(self, folder: Path) -> AgentProcess:
        return ForkedAgent(folder / "agent.log")

    def _connect(self, member: Member, genesis: Tensor, fragments: tuple[int, ...]) -> None:
        published = member.agent.expect(Published, 60.0)
        assert isinstance(published, Published)
        self._map(member, published, genesis, self.shapes or tuple((size,) for size in fragments), fragments)

    @staticmethod
    def _map(
        member: Member, published: Published, genesis: Tensor, shapes: tuple[tuple[int, ...], ...] | None = None,
        fragments: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Build the member's "model" once the manifest is known."""
        manifest = RunManifest.model_validate(published.manifest)
        member.run_id = manifest.run_id
        member.peer_id, member.maddrs, member.client = published.peer_id, published.maddrs, published.client
        recipe = RunPlan.of(manifest).recipe
        buffers = recipe.optimizer.num_buffers
        numel = genesis.numel() // (1 + buffers)
        largest = max(fragments, default=numel)
        memory = SharedState(member.agent.memory_descriptor, numel, buffers, largest)
        memory.anchor.copy_(genesis[:numel])
        mapped = Mapped(numel=numel, num_buffers=buffers, shapes=shapes or ((numel,),), fragments=fragments)
        parts: dict[str, Any] = {
            "agent": AgentConnection(member.agent, member.start, mapped),
            "local": member.local(memory, recipe, fragments),
            "limits": Limits(rounds_total=manifest.rounds.total, max_rounds=None), "on_message": member.on_message,
        }  # fmt: skip
        member.sync = member.synchroniser(recipe, parts)
        member.agent.send(mapped)

    def drive(self, until: Callable[[], bool], timeout_s: float = 60.0, pace_s: float = 0.01) -> None:
        """Let every member that is not frozen make steps, one every `pace` turns, until the condition holds.

        Args:
            pace_s: between two turns, however many messages come meanwhile.
        """
        now = next_turn = time.monotonic()
        deadline = now + timeout_s
        while not until():
            now = time.monotonic()
            assert now < deadline, self.explain()
            turn = now >= next_turn
            if turn:
                next_turn, self._turns = now + pace_s, self._turns + 1
            awake = [m for m in self.members if turn and not m.frozen and m.sync is not None and not m.sync.finished]
            active = [m for m in awake if self._turns % m.pace == 0 and not (m.waits and m.in_round)]
            for member in active:
                member.step()
            with selectors.DefaultSelector() as selector:
                for member in self.members:
                    if not member.frozen and member.agent._channel is not None:
                        selector.register(member.agent._channel, selectors.EVENT_READ)
                selector.select(max(0.0, next_turn - time.monotonic()))
            for member in self.members:
                if not member.frozen and member not in active:
                    self._poll(member)

    def drive_together(
        self, members: Sequence[Member], until: Callable[[], bool] = lambda: True, timeout_s: float = 60.0
    ) -> set[str]:
        """Until these stand at one lineage id, each with a hashed state, and the condition holds; -> their digests.

        Their agents go on meanwhile: what counts is one look at each, not what a second look would find.
        """
        heads: list[Head | None] = []

        def together() -> bool:
            heads[:] = [member.head for member in members]
            places = {(head.lineage_id, head.state_digest is None) for head in heads if head is not None}
            return None not in heads and {hashing for _, hashing in places} == {False} and len(places) == 1 and until()

        self.drive(together, timeout_s)
        return {head.state_digest for head in heads if head is not None and head.state_digest is not None}

    @staticmethod
    def _poll(member: Member) -> None:
        assert member.sync is not None
        try:
            member.sync.poll()
        except AgentGoneError:
            member.frozen = member.sync.finished  # else its next step starts another agent

    def explain(self) -> str:
        """What everybody did, for the message of a failed test."""
        lines = ["timed out"]
        for member in self.members:
            place = f"round {member.round} lineage {str(member.lineage_id)[:8]}"
            lines.append(f"{member.name} {member.peer_id[-8:]} {place}")
            for r in member.records[-8:]:
                lines.append(f"   {r.status} {r.round} {r.phase or ''} {r.reason or ''} {len(r.members)}")
            lines.append("   " + "\n   ".join(member.log_text().splitlines()[-12:]))
        return "\n".join(lines)

    def close(self) -> None:
        for member in self.members:
            member.agent.close()
        for bootstrap in self.bootstraps:
            bootstrap.close()
