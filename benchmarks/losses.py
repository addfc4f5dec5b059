"""Validation loss at equal tokens: a real swarm beside the simulator, overlapping rounds beside blocking ones."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.figures import (
    RESUME,
    BenchReport,
    Figure,
    ResumableRows,
    Say,
    benchmark_parser,
    check_count,
    documents,
    run_benchmark,
)
from peer.data.tokenizer import load_tokenizer
from peer.genesis import build_initial_model
from peer.link.local_anchor import LocalAnchor
from peer.link.memory import SharedState
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.language_task import language_task, load_windows
from peer.sim.learner.task import LanguageTask
from peer.sim.world.scenario import PeerProfile
from peer.train.evaluate import evaluate
from peer.train.optim import build_optimizer
from peer.train.replica import ModelReplica
from peer.train.step import Trainer
from tests.network.harness import TestSwarm
from tests.network.members import Member

NAME = "losses"
ABOUT = "Validation loss after as many tokens: real peers beside simulated ones, and overlapping rounds beside blocking"
NOTES = """\
{peers} peers train the demo task (a byte-level Llama of 0.1M parameters) for {steps} steps each, {length} to a round,
at a constant rate, with the outer step Nesterov, lr .7, momentum .3, and int8 payloads. Real peers are agents with
chains, signatures and sockets of this machine, each with the production trainer; they make no step between sending
and the arrival of the result, so that results are merged after as many steps as in the simulator. Only `diloco, going
on` trains on meanwhile, as `atoll join` does. The loss is that of the anchor once the last round is over, on all
validation text. Seeds: initial weights and the order of the data. Why overlap stays behind, on real peers as in the
simulator: of two fragments streaming sends one half a round before the end, so that half of the anchor lacks the last
{half} steps, which matters less the longer the run is; eager takes two thirds of each round's work from the others, a
round late, and no outer rate or momentum that was simulated beside these made up for it."""
TARGET, PEERS = 0.5, 3
OUTER = "compressor: int8, outer_learning_rate: 0.7, outer_momentum: 0.3, aggregator: mean"
RECIPES = {
    "diloco": f"name: diloco, {OUTER}",
    "streaming-diloco": f"name: streaming-diloco, {OUTER}, schedule: {{num_fragments: 2}}",
    "eager-diloco": f"name: eager-diloco, {OUTER}",
}
HEADER = ("recipe", "seed", "real", "simulated", "difference", "to diloco of the seed")
TASK = Path(__file__).parent.parent / "peer" / "sim" / "tasks" / "demo.yaml"
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """The losses of one recipe and seed; `waits`: real peers made no step while a round was under way."""

    recipe: str
    seed: int
    waits: bool
    real: float
    simulated: float | None

    @property
    def what(self) -> str:
        """As the table calls it."""
        return self.recipe if self.waits else f"{self.recipe}, going on"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(NAME, "Trains three peers with each recipe and seed, on a real swarm and simulated.")
    parser.add_argument("--steps", type=int, default=180, metavar="N", help="of each peer (default: 180)")
    parser.add_argument("--steps-per-round", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--resume", type=Path, metavar="FILE", help=RESUME.format(same="steps"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Every recipe with every seed."""
    for flag, count in (("--steps", arguments.steps), ("--steps-per-round", arguments.steps_per_round)):
        check_count(flag, count, 1)
    under = {"steps": arguments.steps, "steps_per_round": arguments.steps_per_round}
    kept, rows = ResumableRows(LossRow, arguments.resume, under), list[LossRow]()
    for seed in dict.fromkeys(arguments.seeds):
        for recipe, waits in (*((name, True) for name in RECIPES), ("diloco", False)):
            known = kept.find(recipe=recipe, seed=seed, waits=waits)
            rows.append(known or kept.keep(row_of(recipe, seed, waits, arguments.steps, arguments.steps_per_round)))
            say(f"{rows[-1]} load {os.getloadavg()[0]:.1f}")
    length = arguments.steps_per_round
    notes = NOTES.format(peers=PEERS, steps=arguments.steps, length=length, half=length // 2)
    notes = f"{notes}\n{kept.note()}".strip()
    options = ("--steps", str(arguments.steps), "--steps-per-round", str(arguments.steps_per_round), "--seeds",
               *map(str, arguments.seeds))  # fmt: skip
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=notes, options=options,
        table=(HEADER, *(line(row, rows) for row in rows)), more={"rows": documents(rows)},
    )  # fmt: skip


def figures(rows: Sequence[LossRow]) -> tuple[Figure, ...]:
    """How far the real swarm is from the simulator, and overlap from blocking, in the mean over the seeds."""
    found = []
    for name in dict.fromkeys(row.recipe for row in rows):
        apart = [abs(row.real / row.simulated - 1.0) for row in rows if row.recipe == name and row.simulated]
        found.append(Figure(name=f"{name}: real from simulated", value=100.0 * fmean(apart), unit="%", limit=TARGET))
    for what in dict.fromkeys(row.what for row in rows):
        gaps = [100.0 * gap(row, rows) for row in rows if row.what == what]
        if what != "diloco":
            found.append(Figure(name=f"{what}: above diloco", value=fmean(gaps), unit="%", limit=TARGET))
    return tuple(found)


def gap(row: LossRow, rows: Sequence[LossRow]) -> float:
    """By what share the loss is above that of blocking DiLoCo with the same seed."""
    blocking = next(other for other in rows if (other.what, other.seed) == ("diloco", row.seed))
    return row.real / blocking.real - 1.0


def line(row: LossRow, rows: Sequence[LossRow]) -> tuple[str, ...]:
    """A row as text."""
    simulated, apart = "-", "-"
    if row.simulated is not None:
        simulated, apart = f"{row.simulated:.4f}", f"{100.0 * (row.real / row.simulated - 1.0):+.3f}%"
    return row.what, str(row.seed), f"{row.real:.4f}", simulated, apart, f"{100.0 * gap(row, rows):+.2f}%"


def row_of(recipe: str, seed: int, waits: bool, steps: int, length: int) -> LossRow:
    """One recipe with one seed."""
    torch.set_num_threads(1)
    head = TASK.read_text().split("\nrecipe:")[0].replace("\nseed: 1\n", f"\nseed: {seed}\n")
    text = (
        f"{head}\nrecipe: {{{RECIPES[recipe]}, steps_per_round: {length}}}\n"
        "trust: {identity_work: 0, mode: private}\nrounds: {straggler_wait_s: 30}\n"
    )
    manifest = parse_manifest(text.encode(), "benchmark")
    changes = {"warmup_steps": 0, "min_learning_rate_ratio": 1.0, "optimizer": "adamw"}
    manifest = manifest.model_copy(update={"inner": manifest.inner.model_copy(update=changes)})
    windows = load_windows(manifest, ())
    task = language_task(manifest, windows, seed)
    simulated = simulate(manifest, task, steps) if waits else None
    with trained(text, manifest, task, steps, waits=waits) as members:
        real = evaluate(anchored(members[0]), windows[1], len(windows[1]), 32)
    return LossRow(recipe=recipe, seed=seed, waits=waits, real=real, simulated=simulated)


def simulate(manifest: RunManifest, task: LanguageTask, steps: int) -> float:
    """The loss of the anchor when all simulated peers have made so many steps, and every round that began is over."""
    found: list[float] = []

    def look(made: int, *_: Any) -> None:
        if made == PEERS * steps + 1:
            found.append(task.validate(simulation.consensus(), final=True))

    setup = SimulationSetup(
        recipe=RunPlan.of(manifest).recipe, inner=manifest.inner, profiles=(PeerProfile(),) * PEERS, evaluations=1,
        tokens=PEERS * (steps + 1) * task.tokens_per_step, seed=0,
    )  # fmt: skip
    simulation = Simulation(setup, task, progress=look)
    simulation.run()
    return found[0]


@dataclass
class TrainedMember(Member):
    """A member with the production trainer on the task's model."""

    batches: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    manifest: RunManifest | None = None
    last_step: int = 1

    def local(self, memory: SharedState, recipe: Recipe, fragments: Sequence[int]) -> LocalAnchor:
        """See `Member.local`."""
        assert self.manifest is not None
        self.model: PreTrainedModel = build_initial_model(self.manifest, load_tokenizer(self.manifest.tokenizer))
        inner, layout = self.manifest.inner, FlatLayout.of(self.model, recipe.cut)
        self.trainer = Trainer(self.model, build_optimizer(self.model, inner), inner, lambda: inner.learning_rate)
        self.parameters = ModelReplica(layout, self.model)
        return LocalAnchor(memory, self.parameters, recipe.optimizer, recipe.late_merge, fragments)

    def step(self) -> None:
        """See `Member.step`."""
        assert self.sync is not None
        if self.sync.step < self.last_step:
            self.sync.after_step(self.trainer.step(next(self.batches)))
        else:
            self.sync.poll()

    def has(self, round: int) -> bool:
        """Its agent has the state after so many rounds."""
        head = self.head  # the agent may be about to change it
        return head is not None and head.round >= round


@contextmanager
def trained(
    text: str, manifest: RunManifest, task: LanguageTask, steps: int, *, waits: bool, peers: int = PEERS
) -> Iterator[list[TrainedMember]]:
    """Real peers when all have made so many steps, and every round that began is over."""
    recipe = RunPlan.of(manifest).recipe
    rounds = recipe.rounds.within(steps)
    with tempfile.TemporaryDirectory(prefix="losses-") as folder:
        swarm = TestSwarm(Path(folder) / "swarm")
        swarm.manifest_text, swarm.kind = text, partial(TrainedMember, manifest=manifest)
        try:
            swarm.bootstrap()
            members = cast("list[TrainedMember]", swarm.add(*(f"p{index}" for index in range(peers))))
            for index, member in enumerate(members):
                member.batches, member.waits = task.batches(index), waits
            swarm.drive(lambda: all(sees(member, peers) for member in members), TIMEOUT_S)
            for member in members:
                member.last_step = steps
            swarm.drive(lambda: all(member.has(rounds) for member in members), TIMEOUT_S)
            yield members
        finally:
            swarm.close()


def anchored(member: TrainedMember) -> PreTrainedModel:
    """Its model with the anchor's parameters."""
    assert member.sync is not None
    member.parameters.write(member.sync.memory.anchor)
    return member.model


def sees(member: Member, peers: int) -> bool:
    """It knows of all others that they train."""
    return member.swarm is not None and sum(peer.step > 0 for peer in member.swarm.peers.values()) == peers


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
