"""Steps of the production loop, alone and in a swarm, against a loop by hand and transformers' Trainer, in one run."""

from __future__ import annotations

import argparse
import contextlib
import copy
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import yaml
from rich.console import Console

from benchmarks.contestants import SYSTEMS, Run, Work
from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from benchmarks.processes import cpu_seconds
from peer.demo.folder import manifest_text
from peer.demo.play import LOOPBACK
from peer.link.messages import Anchor, Published, Start
from peer.link.supervisor import AgentProcess
from peer.run.assemble import FoundRun, Peer, assemble
from peer.run.hooks import PeerHooks
from peer.settings import load_settings
from peer.system.clock import Clock
from peer.telemetry.console import LiveSwarm
from peer.telemetry.metrics import MetricsFile
from peer.train.compute import Compute
from peer.train.loop import train
from tests.network.bootstraps import BootstrapProcess

NAME = "step"
ABOUT = "Steps with accumulation, between rounds: ours, a loop by hand, transformers' Trainer; quickstart model, CPU"
STEPS_BETWEEN_ROUNDS = 100_000
SWARM_ROUNDS = 10
TIMEOUT_S = 60.0
WINDOWS = 256
IN_SWARM, BY_HAND, ALONE, THEIRS = "in a swarm", "by hand", "ours alone", "transformers"
LIMITS = {(ALONE, BY_HAND): 0.99, (IN_SWARM, ALONE): 0.98, (ALONE, THEIRS): 1.0}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Alternates blocks of steps in one process, all on copies of one model and with the same micro-batches:\n"
        "`peer.train.loop` alone; the same with sync, hooks, metrics and a real agent; the loop that one writes by\n"
        "hand (forward, backward, clip, AdamW); transformers.Trainer. The agent stays up during all of them.",
    )
    parser.add_argument("--blocks", type=int, default=15, metavar="N", help="blocks of each kind (default: 15)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps in a block (default: 20)")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N", help="of a step's 8 sequences (default: 4)")
    parser.add_argument(
        "--processor-time", action="store_true", help="of this process's own, for a machine that has other work"
    )
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Start a bootstrap, a peer without `atoll join` around it, and alternate."""
    for flag in ("blocks", "steps", "micro_batch"):
        check_count(f"--{flag.replace('_', '-')}", getattr(arguments, flag), 1)
    with (
        tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder,
        _peer(Path(folder), arguments.seed, arguments.micro_batch) as (peer, hooks),
    ):
        say("the agent is up; warming up")
        timer = time.process_time if arguments.processor_time else time.perf_counter
        runs = {**_alone(peer, arguments.micro_batch, timer), IN_SWARM: _in_swarm(peer, hooks, timer)}
        for run in runs.values():
            run(arguments.steps)
        assert peer.agent.pid is not None
        began, used = time.monotonic(), cpu_seconds(peer.agent.pid)
        tokens = peer.manifest.tokens_per_step * arguments.steps
        rates = _alternate(runs, arguments.blocks, arguments.steps, tokens, say)
        agent_cores = (cpu_seconds(peer.agent.pid) - used) / (time.monotonic() - began)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rates, agent_cores),
        samples={f"{name}_tokens_per_s": values for name, values in rates.items()},
        notes="A ratio is the median of those of the blocks: neighbours in time see the same machine."
        + (" Seconds are those of this process's processor time." if arguments.processor_time else ""),
        options=(
            "--micro-batch", str(arguments.micro_batch), *(["--processor-time"] if arguments.processor_time else []),
        ),
    )  # fmt: skip


def figures(rates: dict[str, list[float]], agent_cores: float) -> tuple[Figure, ...]:
    """Ratios of neighbouring blocks, and medians."""
    ratios = [
        Figure(name=f"{first} / {second}", unit="x", limit=limit, at_most=False,
               value=median([a / b for a, b in zip(rates[first], rates[second], strict=True)]))
        for (first, second), limit in LIMITS.items()
    ]
    medians = [Figure(name=f"{name}, median", value=median(found), unit="tokens/s") for name, found in rates.items()]
    return (*ratios, *medians, Figure(name="agent and its daemon, on average", value=agent_cores, unit="cores"))


def _alternate(runs: dict[str, Run], blocks: int, steps: int, tokens: int, say: Say) -> dict[str, list[float]]:
    """-> tokens per second of each block; who is first in a block moves on, as a machine may slow down within it."""
    names = list(runs)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for block in range(blocks):
        first = block % len(names)
        for name in (*names[first:], *names[:first]):
            rates[name].append(tokens / runs[name](steps))
        say(f"block {block + 1} of {blocks}: " + ", ".join(f"{name} {rates[name][-1]:.0f}" for name in names))
    return rates


def _alone(peer: Peer, micro_batch: int, timer: Clock) -> dict[str, Run]:
    rows = torch.cat([batch for batch, _ in islice(peer.batches, -(-WINDOWS // peer.text.batch_sequences))])
    inner, compute = peer.recipe.inner_settings(peer.manifest.inner), Compute(micro_batch=micro_batch)
    work = Work(rows_nt=rows, inner=inner, compute=compute, device=torch.device("cpu"), timer=timer)
    return {name: make(copy.deepcopy(peer.model).train(), work) for name, make in SYSTEMS.items()}


def _in_swarm(peer: Peer, hooks: PeerHooks, timer: Clock) -> Run:
    def run(steps: int) -> float:
        began = timer()
        train(peer.trainer, islice(hooks.batches, steps), peer.sync, hooks)
        return timer() - began

    return run


@contextlib.contextmanager
def _peer(folder: Path, seed: int, micro_batch: int) -> Iterator[tuple[Peer, PeerHooks]]:
    """What `atoll join` builds, up to the first step, in a run whose next round is far away."""
    manifest = yaml.safe_load(manifest_text(SWARM_ROUNDS, seed))
    manifest["recipe"]["steps_per_round"] = STEPS_BETWEEN_ROUNDS
    bootstrap = BootstrapProcess(folder / "bootstrap", yaml.safe_dump(manifest))
    home = folder / "peer"
    home.mkdir()
    agent = AgentProcess(home / "agent.log")
    try:
        chosen = {"output_dir": home, "device": "cpu", "save_steps": 0, "eval_every_rounds": 0, "data_seed": seed}
        chosen |= {"per_device_train_batch_size": micro_batch, "host_maddrs": LOOPBACK}
        settings = load_settings(chosen, None, {})
        start = Start(
            initial_peers=(bootstrap.address,),
            host_maddrs=settings.host_maddrs,
            identity_path=str(home / "identity.key"),
            nickname="benchmark",
            directory=str(home),
            nat_port_map=False,
        )
        agent.start()
        agent.send(start)
        run = FoundRun.of(agent.expect(Published, TIMEOUT_S))
        peer = assemble(
            settings, start, run, agent, lambda message: hooks.on_message(message), lambda: False
        )
        agent.send(peer.mapped)
        title = run.plan.manifest.name
        with LiveSwarm(Console(quiet=True), title=title, live=False) as table:
            hooks = PeerHooks(peer, MetricsFile(home / "metrics.jsonl"), table, lambda: False)
            peer.sync.begin(agent.expect(Anchor, TIMEOUT_S))
            yield peer, hooks
    finally:
        agent.close()
        bootstrap.close()


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
