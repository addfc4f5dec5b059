"""Real swarms for tests: real bootstrap, agents, DHT and sockets. Only the inner training is replaced by arithmetic.

A `Member` is the production `SwarmSync` over a production agent process; its "model" is a vector that moves by a known
amount at every step, so that a test can compute what the swarm must arrive at.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bootstrap import cli
from peer.lifetime import die_with_parent
from peer.link.memory import Head, SharedState
from peer.link.messages import Anchor, Mapped, Message, Published, Round, Start, Stop, Stopped, Swarm
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.link.sync import Limits, SwarmSync
from peer.link.voting import VotingSync
from peer.outer.compose import run_recipe
from peer.outer.record import RoundRecord
from peer.outer.schedules import GradientChange
from peer.protocol.manifest import RunManifest
from tests.network.forked import ForkedAgent, ForkedProcess

MANIFEST = """
name: test
seed: 3
model:
  architecture: llama
  config: {{vocab_size: 264, hidden_size: {hidden}, intermediate_size: {hidden}, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true,
           bos_token_id: null, eos_token_id: 1, pad_token_id: 0}}
data: {{sequence_length: 8}}
inner: {{batch_sequences: 4}}
recipe: {{{recipe}, steps_per_round: {steps}}}
rounds: {{straggler_wait_s: {wait}, timeout_s: 20{total}}}
"""
DILOCO = "name: diloco, compressor: int8, outer_learning_rate: 0.7, outer_momentum: 0.6"
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

    def read(self, out: Tensor) -> None:
        out.copy_(self.flat)

    def write(self, flat: Tensor) -> None:
        self.flat.copy_(flat)


class BootstrapProcess:
    """`atoll-bootstrap` as a child; `address` is what a peer joins with.

    The initial state of a manifest is built once in a test run: later nodes find it in their folders, as one finds it
    that is started again.
    """

    _built: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(
        self, folder: Path, manifest_text: str, initial_peers: Sequence[str] = (), port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.yaml"
        path.write_text(manifest_text)
        for name, content in self._built.get(manifest_text, {}).items():
            (folder / name).write_bytes(content)
        self.folder = folder
        arguments = [str(path), "--json", "--state-dir", str(folder), "--host-maddrs", f"/ip4/{host}/tcp/{port}"]
        if initial_peers:
            arguments += ["--initial-peers", *initial_peers]
        reading, writing = os.pipe()
        self.output = os.fdopen(reading, "rb")
        parent = os.getpid()

        def main() -> None:
            die_with_parent(parent)
            cli.main()

        self.process = ForkedProcess(main, arguments, folder / "bootstrap.log", stdout=writing)
        os.close(writing)
        started = json.loads(self._first_line())
        self.address: str = started["addresses"][0]
        self.run_id: str = started["run_id"]
        self._built[manifest_text] = {name: (folder / name).read_bytes() for name in ("genesis.bin", "genesis.json")}

    @property
    def port(self) -> int:
        return int(self.address.split("/")[4])

    def _first_line(self) -> bytes:
        line = self.output.readline()
        assert line, (self.folder / "bootstrap.log").read_text()
        return line

    def genesis(self) -> Tensor:
        """The initial state, anchor first."""
        return torch.frombuffer(bytearray((self.folder / "genesis.bin").read_bytes()), dtype=torch.float32)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)  # on busy cores the interpreter alone takes seconds to end
        self.kill()
        self.output.close()


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
    maddrs: tuple[str, ...] = ()
    client: bool = False
    records: list[RoundRecord] = field(default_factory=list)
    swarm: Swarm | None = None
    stopped: Stopped | None = None
    frozen: bool = False
    pace: int = 1
    grad_norm: float = 1.0
    waits: bool = False  # makes no step between a snapshot and its round

    @property
    def committed(self) -> list[RoundRecord]:
        return [record for record in self.records if record.status == "committed"]

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
        return self.sync._outstanding is not None

    def on_message(self, message: Message) -> None:
        if isinstance(message, Round):
            self.records.append(message.record)
        elif isinstance(message, Swarm):
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


class TestSwarm:
    """Starts, drives and cleans up bootstraps and members."""

    __test__ = False

    def __init__(
        self, folder: Path, *, hidden: int = 16, steps: int = 5, wait: float = 5.0, total: int | None = None,
        recipe: str = DILOCO, min_group: int = 2,
    ) -> None:
        self.folder = folder
        self.shapes: tuple[tuple[int, ...], ...] | None = None  # of the "model"; one vector
        rounds = f", min_group: {min_group}" + (f", total: {total}" if total else "")
        self.manifest_text = MANIFEST.format(hidden=hidden, recipe=recipe, steps=steps, wait=wait, total=rounds)
        self.bootstraps: list[BootstrapProcess] = []
        self.members: list[Member] = []
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
            self._connect(member, bootstrap.genesis() if genesis is None else genesis)
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
        return Member(name, folder, agent, start, push=torch.zeros(1) + 1e-3 * (number + 1))

    def _start_of(self, name: str, address: str, folder: Path) -> Start:
        return Start(
            initial_peers=(address,),
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            identity_path=str(folder / "identity.key"),
            nickname=name,
            directory=str(folder),
        )

    def _start_agent(self, name: str, agent: AgentProcess) -> None:  # noqa: ARG002
        agent.start()

    def _agent(self, folder: Path) -> AgentProcess:
        return ForkedAgent(folder / "agent.log")

    def _connect(self, member: Member, genesis: Tensor) -> None:
        published = member.agent.expect(Published, 60.0)
        assert isinstance(published, Published)
        self._map(member, published, genesis, self.shapes)

    @staticmethod
    def _map(
        member: Member, published: Published, genesis: Tensor, shapes: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        """Build the member's "model" once the manifest is known."""
        manifest = RunManifest.model_validate(published.manifest)
        member.peer_id, member.maddrs, member.client = published.peer_id, published.maddrs, published.client
        recipe = run_recipe(manifest)
        buffers = recipe.optimizer.num_buffers
        numel = genesis.numel() // (1 + buffers)
        memory = SharedState(member.agent.memory_descriptor, numel, buffers)
        memory.anchor.copy_(genesis[:numel])
        mapped = Mapped(numel=numel, num_buffers=buffers, shapes=shapes or ((numel,),))
        member.replica = VectorReplica(torch.empty(numel))
        parts: dict[str, Any] = {
            "agent": member.agent, "start": member.start, "mapped": mapped, "memory": memory,
            "replica": member.replica, "optimizer": recipe.optimizer,
            "limits": Limits(total_rounds=manifest.rounds.total, max_rounds=None), "on_message": member.on_message,
        }  # fmt: skip
        if isinstance(recipe.schedule, GradientChange):
            member.sync = VotingSync(recipe.schedule, **parts)
        else:
            member.sync = SwarmSync(schedule=recipe.rounds, **parts)
        member.agent.send(mapped)

    def drive(self, until: Callable[[], bool], timeout_s: float = 60.0, pace_s: float = 0.01) -> None:
        """Let every member that is not frozen make steps, one every `pace` turns, until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, self.explain()
            self._turns += 1
            awake = [m for m in self.members if not m.frozen and m.sync is not None and not m.sync.finished]
            active = [m for m in awake if self._turns % m.pace == 0 and not (m.waits and m.in_round)]
            for member in active:
                member.step()
            with selectors.DefaultSelector() as selector:
                for member in self.members:
                    if not member.frozen and member.agent._channel is not None:
                        selector.register(member.agent._channel, selectors.EVENT_READ)
                selector.select(pace_s)
            for member in self.members:
                if not member.frozen and member not in active:
                    self._poll(member)

    def drive_together(
        self, members: Sequence[Member], until: Callable[[], bool] = lambda: True, timeout_s: float = 60.0
    ) -> set[str]:
        """Until these stand at one lineage id, each with a whole state, and the condition holds; -> their digests.

        Their agents go on meanwhile: what counts is one look at each, not what a second look would find.
        """
        heads: list[Head | None] = []

        def together() -> bool:
            heads[:] = [member.head for member in members]
            return None not in heads and len({head.lineage_id for head in heads if head is not None}) == 1 and until()

        self.drive(together, timeout_s)
        return {head.state_digest for head in heads if head is not None}

    @staticmethod
    def _poll(member: Member) -> None:
        assert member.sync is not None
        try:
            member.sync.poll()
        except AgentGoneError:
            member.frozen = True

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
