"""Swarms of real agents whose training is arithmetic on a vector: all of the network, nothing of the model."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from peer.errors import UserError
from peer.link.supervisor import AgentProcess
from tests.network.harness import TestSwarm
from tests.network.members import Member

MANIFEST = """
name: benchmark
seed: {seed}
model:
  architecture: llama
  config: {{vocab_size: 264, hidden_size: {hidden}, intermediate_size: {intermediate}, num_hidden_layers: {layers},
           num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 256, tie_word_embeddings: true,
           bos_token_id: null, eos_token_id: 1, pad_token_id: 0}}
data: {{sequence_length: 8}}
inner: {{batch_sequences: 4}}
recipe: {{{recipe}, steps_per_round: {steps}}}
rounds: {{straggler_wait_s: 15, timeout_s: 60}}
"""
INT8 = "name: diloco, compressor: int8, outer_learning_rate: 0.7, outer_momentum: 0.6"
STEPS_PER_ROUND = 5
PACE_S = 0.05
NOISE = 1e-3
LOG_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A llama with 264 tokens, tied embeddings and as many key-value heads as heads, and how and how often it is
    averaged.
    """

    hidden: int
    intermediate: int
    layers: int
    steps_per_round: int = STEPS_PER_ROUND
    recipe: str = INT8

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters: embeddings, attention, MLP and norms."""
        square, wide, norm = (self.hidden, self.hidden), (self.intermediate, self.hidden), (self.hidden,)
        layer = (square,) * 4 + (wide, wide, wide[::-1], norm, norm)
        return ((264, self.hidden), *layer * self.layers, norm)

    @property
    def numel(self) -> int:
        """P."""
        return sum(math.prod(shape) for shape in self.shapes)

    def manifest_text(self, seed: int) -> str:
        """A run of this model as YAML."""
        return MANIFEST.format(
            seed=seed, hidden=self.hidden, intermediate=self.intermediate, layers=self.layers,
            steps=self.steps_per_round, recipe=self.recipe,
        )  # fmt: skip


SHAPES = {
    "0.8M": Shape(hidden=128, intermediate=344, layers=4),  # the model of the demo
    "10M": Shape(hidden=320, intermediate=864, layers=8),
    "50M": Shape(hidden=640, intermediate=1728, layers=10),
}


class VectorSwarm(TestSwarm):
    """`TestSwarm` whose agents are spawned as in production: their memory is their own."""

    def _agent(self, folder: Path) -> AgentProcess:
        return AgentProcess(folder / "agent.log")


@contextlib.contextmanager
def vector_swarm(shape: Shape, seed: int, names: tuple[str, ...]) -> Iterator[TestSwarm]:
    """A bootstrap and one agent for each name, all at their first anchor; steps add noise, its own for each.

    This process, which plays all trainers, computes with one thread, as each agent does.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder:
        swarm = VectorSwarm(Path(folder))
        # a model in fragments has another order of parameters, which only the bootstrap knows
        swarm.manifest_text = shape.manifest_text(seed)
        swarm.shapes = None if "num_fragments" in shape.recipe else shape.shapes
        try:
            swarm.bootstrap()
            generator = torch.Generator().manual_seed(seed)
            for member in swarm.add(*names):
                member.push = torch.randn(shape.numel, generator=generator) * NOISE
            yield swarm
        except UserError as error:
            logs = (path.read_text()[-LOG_CHARS:] for path in sorted(Path(folder).glob("*/*.log")))
            raise UserError(error.what, "\n".join(logs)) from None
        finally:
            swarm.close()
            torch.set_num_threads(threads)


def drive_rounds(swarm: TestSwarm, rounds: int, timeout_s: float) -> None:
    """Until every member has committed so many rounds more."""
    goals = [len(member.committed) + rounds for member in swarm.members]

    def reached() -> bool:
        return all(len(m.committed) >= goal for m, goal in zip(swarm.members, goals, strict=True))

    swarm.drive(reached, timeout_s, PACE_S)


def leader_of(member: Member) -> int:
    """Process id of the agent, which leads a session of its own."""
    assert member.agent.pid is not None
    return member.agent.pid
