"""What simulating costs: time against bare training loops, memory of a replica, seconds of a thousand peers."""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.bare import bare_loop, plain_adamw
from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, run_benchmark
from benchmarks.processes import highest_resident_bytes
from peer.data.batches import Batches, Resident
from peer.data.tokenizer import ByteTokenizer
from peer.genesis import build_initial_model
from peer.protocol.manifest import RunManifest
from peer.sim.campaign.label import parse_label, with_room
from peer.sim.campaign.plan import WindowPair, load_task, meta_layout
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.language_task import language_task, load_windows
from peer.sim.learner.task import LanguageTask
from peer.sim.world.scenario import PeerProfile, load_scenario

NAME = "simulator"
ABOUT = "The simulator in one process: training against bare PyTorch loops, memory of a replica, a thousand peers"
RECIPE = "diloco:steps_per_round=30"
TASKS = {"0.8M": "configs/runs/quickstart.yaml", "0.1M": "demo"}
TIMED = (
    RECIPE, "ddp", "streaming-diloco:schedule.period=30,schedule.num_fragments=2", "sparseloco", "async-diloco",
    "noloco:steps_per_round=30",
)
MEASURED = ("diloco:steps_per_round=5", "sparseloco:steps_per_round=5")
Watch = Callable[[int], None]
BLOCK_STEPS = 5
MEMORY_STEPS = 16  # three rounds, and a step from the last result
MAX_RATIO = 1.15
MAX_SWARM_MB = 4000.0
MAX_TIMING_S = 60.0
# Of each parameter: itself and two moments; a residual; at most half a byte of anything else.
STATE_BYTES, RESIDUAL_BYTES, SLACK_BYTES = 12.0, 4.0, 0.5


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Replicas of the simulator and plain models train in turns, five steps of each, and the processor time of\n"
        "both is compared. Memory is that of the tensors that exist, and of processes at their highest. A thousand\n"
        "peers are simulated without training, on home connections; their seconds are processor time too.",
    )
    parser.add_argument("--replicas", type=int, default=8, metavar="K", help="that train (default: 8)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each replica (default: 60)")
    parser.add_argument("--swarm", type=int, default=64, metavar="N", help="peers in the large swarm (default: 64)")
    parser.add_argument("--peers", type=int, default=1000, metavar="N", help="whose time is simulated (default: 1000)")
    parser.add_argument("--timing-steps", type=int, default=300, metavar="N", help="of each of them (default: 300)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Time, memory, and many peers."""
    for flag in ("replicas", "steps", "swarm", "peers", "timing_steps"):
        check_count(f"--{flag.replace('_', '-')}", getattr(arguments, flag), 2)
    replicas, seed = arguments.replicas, arguments.seed
    found = Findings(replicas=replicas, swarm_peers=arguments.swarm, timed_peers=arguments.peers)
    for size, task in TASKS.items():
        say(f"{size}: {replicas} replicas and as many bare loops")
        found.overheads[size] = overhead(SwarmSize.load(task, RECIPE, replicas, seed), arguments.steps)
    for recipe in MEASURED:
        for count in (replicas, 2 * replicas):
            say(f"{recipe}: memory of {count} replicas of 0.8M parameters")
            found.memories[recipe, count] = in_a_process(TASKS["0.8M"], recipe, count, seed)
    say(f"memory of {arguments.swarm} peers of 0.1M parameters")
    found.swarm = in_a_process(TASKS["0.1M"], RECIPE, arguments.swarm, seed)
    for recipe in TIMED:
        say(f"{recipe}: {arguments.peers} peers, {arguments.timing_steps} steps of each, without training")
        found.timed_s[recipe] = timing_seconds(recipe, arguments.peers, arguments.timing_steps, seed)
    return BenchReport(name=NAME, about=ABOUT, seed=seed, figures=found.figures(), samples=found.samples())


@dataclass(frozen=True)
class Overhead:
    """Seconds of processor time, block by block: the simulation's, and of as many bare steps after it."""

    simulation_s: list[float]
    bare_s: list[float]

    @property
    def ratio(self) -> float:
        """Of the sums: rounds happen in some blocks only."""
        return sum(self.simulation_s) / sum(self.bare_s)


@dataclass(frozen=True)
class Memory:
    """Bytes of one simulation.

    Attributes:
        tensors: that exist between rounds.
        in_round: that existed at once, at most, when a step was over; contributions wait for the last of them then.
        resident: of the process, at its highest.
    """

    parameters: int
    tensors: int
    in_round: int
    resident: int


@dataclass
class Findings:
    """Everything that was measured."""

    replicas: int
    swarm_peers: int
    timed_peers: int
    overheads: dict[str, Overhead] = field(default_factory=dict)
    memories: dict[tuple[str, int], Memory] = field(default_factory=dict)
    swarm: Memory | None = None
    timed_s: dict[str, float] = field(default_factory=dict)

    def figures(self) -> tuple[Figure, ...]:
        """What the samples come to."""
        found = [
            Figure(name=f"{size}: simulator / {self.replicas} bare loops", value=own.ratio, unit="x", limit=MAX_RATIO)
            for size, own in self.overheads.items()
        ]
        for recipe in dict.fromkeys(recipe for recipe, _ in self.memories):
            few, many = (self.memories[recipe, count] for count in (self.replicas, 2 * self.replicas))
            residual = RESIDUAL_BYTES if parse_label(recipe).recipe().feedback is not None else 0.0
            limit, name = STATE_BYTES + residual + SLACK_BYTES, recipe.partition(":")[0]
            for what, value, most in (
                ("tensors", many.tensors - few.tensors, limit),
                ("tensors, in a round", many.in_round - few.in_round, None),
                ("process, at its peak", many.resident - few.resident, None),
            ):
                each = value / self.replicas / few.parameters
                found.append(Figure(name=f"{name}, one more replica: {what}", value=each, unit="B/value", limit=most))
        if self.swarm is not None:
            name, megabytes = f"{self.swarm_peers} peers of 0.1M: peak of the process", self.swarm.resident / 1e6
            found.append(Figure(name=name, value=megabytes, unit="MB", limit=MAX_SWARM_MB))
        for recipe, seconds in self.timed_s.items():
            name = f"{self.timed_peers} peers, time alone: {recipe.partition(':')[0]}"
            found.append(Figure(name=name, value=seconds, unit="s", limit=MAX_TIMING_S))
        return tuple(found)

    def samples(self) -> dict[str, Any]:
        """As JSON types."""
        memories: list[Mapping[str, Any]] = [
            {"recipe": recipe, "replicas": count, **asdict(own)} for (recipe, count), own in self.memories.items()
        ]
        return {
            "overhead": {size: asdict(own) for size, own in self.overheads.items()},
            "memory": memories,
            "swarm": asdict(self.swarm) if self.swarm is not None else None,
            "timed_s": self.timed_s,
        }


@dataclass(frozen=True)
class SwarmSize:
    """Equal replicas on an ideal network."""

    manifest: RunManifest
    windows: WindowPair
    recipe: str
    replicas: int

    @classmethod
    def load(cls, task: str, recipe: str, replicas: int, seed: int) -> SwarmSize:
        """With the text of a shipped task or a manifest."""
        manifest = load_task(task).model_copy(update={"seed": seed})
        return cls(manifest, load_windows(manifest, ()), recipe, replicas)

    def simulation(self, steps: int, watch: Watch) -> Simulation:
        """Ready to run so many steps of each replica; nothing is evaluated."""
        task = _Unevaluated(language_task(self.manifest, self.windows, self.manifest.seed))
        setup = SimulationSetup(
            recipe=parse_label(self.recipe).recipe(), inner=self.manifest.inner,
            profiles=(PeerProfile(),) * self.replicas, tokens=steps * self.replicas * task.tokens_per_step,
            seed=self.manifest.seed, evaluations=1,
        )
        return Simulation(setup, task, progress=lambda made, *_: watch(made))


class _Unevaluated:
    """A task whose validation costs nothing. Implements `Task`."""

    def __init__(self, task: LanguageTask) -> None:
        self._task = task
        self.layout, self.tokens_per_step, self.device = task.layout, task.tokens_per_step, task.device
        self.initial, self.batches, self.gradient = task.initial, task.batches, task.gradient

    def validate(self, parameters: Tensor, *, final: bool) -> float:  # noqa: ARG002
        """See `Task.validate`."""
        return 0.0


def overhead(swarm: SwarmSize, steps: int) -> Overhead:
    """A simulation and as many bare loops, in turns of BLOCK_STEPS steps of each replica."""
    bare, found = list(_bare_replicas(swarm)), Overhead([], [])
    began_s = 0.0

    def watch(made: int) -> None:
        nonlocal began_s
        if made % (BLOCK_STEPS * swarm.replicas):
            return
        stopped_s = time.process_time()
        for _ in range(BLOCK_STEPS):
            for model, optimizer, batches in bare:
                bare_loop(model, optimizer, batches, swarm.manifest.inner, 1)
        found.simulation_s.append(stopped_s - began_s)
        began_s = time.process_time()
        found.bare_s.append(began_s - stopped_s)

    simulation = swarm.simulation(max(1, steps // BLOCK_STEPS) * BLOCK_STEPS, watch)
    for model, optimizer, batches in bare:
        bare_loop(model, optimizer, batches, swarm.manifest.inner, 1)   # what the first step of all sets up
    began_s = time.process_time()
    simulation.run()
    found.simulation_s[-1] += time.process_time() - began_s     # the last round
    return found


def _bare_replicas(swarm: SwarmSize) -> Iterator[tuple[PreTrainedModel, torch.optim.Optimizer, Batches]]:
    first = build_initial_model(swarm.manifest, ByteTokenizer()).train()
    for index in range(swarm.replicas):
        model = copy.deepcopy(first)
        batches = Batches([Resident(swarm.windows[0])], swarm.manifest.inner.batch_sequences, index)
        yield model, plain_adamw(model, swarm.manifest.inner), batches


def in_a_process(task: str, recipe: str, replicas: int, seed: int) -> Memory:
    """Memory of a simulation of MEMORY_STEPS steps, in a process that has done nothing else."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_memory, args=(sender, task, recipe, replicas, seed))
    process.start()
    sender.close()
    try:
        memory = receiver.recv()
    finally:
        process.join()
    assert isinstance(memory, Memory)
    return memory


def _measure_memory(sender: Connection, task: str, recipe: str, replicas: int, seed: int) -> None:
    torch.set_num_threads(1)
    seen: list[int] = []

    def watch(made: int) -> None:
        if made % replicas == 0:
            seen.append(tensor_bytes())

    simulation = SwarmSize.load(task, recipe, replicas, seed).simulation(MEMORY_STEPS, watch)
    simulation.run()
    parameters = simulation.layout.numel
    sender.send(Memory(parameters, seen[-1], max(seen), highest_resident_bytes()))


def tensor_bytes() -> int:
    """Of all storages that a tensor of this process refers to, each once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":  # isinstance wakes deprecated proxies
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def timing_seconds(recipe: str, peers: int, steps: int, seed: int) -> float:
    """Processor time of a simulation of time and traffic alone, on home connections."""
    manifest = load_task(TASKS["0.1M"])
    layout, choice = meta_layout(manifest), parse_label(recipe)
    tokens_per_step = manifest.inner.batch_sequences * manifest.data.sequence_length
    setup = SimulationSetup(
        recipe=with_room(choice, choice.recipe(), layout), inner=manifest.inner,
        profiles=load_scenario("home").draw(peers, seed), tokens=steps * peers * tokens_per_step, seed=seed,
    )
    began_s = time.process_time()
    Simulation(setup, None, layout, tokens_per_step).run()
    return time.process_time() - began_s


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
