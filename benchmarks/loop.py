"""Steps per second of the production loop with its agent attached, against a bare PyTorch loop."""

from __future__ import annotations

import argparse
import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import yaml
from rich.console import Console

from benchmarks.bare import bare_loop, plain_adamw
from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from benchmarks.processes import cpu_seconds
from peer.data.batches import Batches
from peer.demo.folder import manifest_text
from peer.demo.play import LOOPBACK
from peer.link.messages import Anchor, Published, Start
from peer.link.supervisor import AgentProcess
from peer.run.assemble import Peer, assemble, plan_of
from peer.run.hooks import PeerHooks
from peer.settings import load_settings
from peer.telemetry.console import LiveSwarm
from peer.telemetry.metrics import MetricsFile
from peer.train.loop import train
from tests.network.bootstraps import BootstrapProcess

NAME = "loop"
ABOUT = "The training loop with its agent attached, between rounds, against a bare PyTorch loop: quickstart model, CPU"
STEPS_BETWEEN_ROUNDS = 100_000
SWARM_ROUNDS = 10
TIMEOUT_S = 60.0
MIN_RATIO = 0.95


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Alternates blocks of steps in one process: `peer.train.loop` with sync, hooks, metrics and a real agent,\n"
        "then the loop that one writes by hand (forward, backward, clip, AdamW) on a copy of the same model and the\n"
        "same batches. The agent stays up during both; its processor time is reported.",
    )
    parser.add_argument("--blocks", type=int, default=15, metavar="N", help="blocks of each kind (default: 15)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps in a block (default: 20)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Start a bootstrap, a peer without `atoll join` around it, and alternate."""
    check_count("--blocks", arguments.blocks, 1)
    check_count("--steps", arguments.steps, 1)
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder, _peer(Path(folder), arguments.seed) as wired:
        peer, hooks = wired
        say("the agent is up; warming up")
        ours = _production(peer, hooks)
        bare = _bare(peer)
        ours(arguments.steps)
        bare(arguments.steps)
        assert peer.agent.pid is not None
        began, used = time.monotonic(), cpu_seconds(peer.agent.pid)
        timed = _alternate(ours, bare, arguments.blocks, arguments.steps, say)
        timed.agent_cores = (cpu_seconds(peer.agent.pid) - used) / (time.monotonic() - began)
    samples = {"production_steps_per_s": timed.production, "bare_steps_per_s": timed.bare}
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(timed), samples=samples)


@dataclass
class LoopRates:
    """Steps per second of each block, and the processor cores that the agent's processes used meanwhile."""

    production: list[float]
    bare: list[float]
    agent_cores: float = 0.0


def figures(timed: LoopRates) -> tuple[Figure, ...]:
    """Medians and their ratio."""
    production, bare = median(timed.production), median(timed.bare)
    return (
        Figure(name="production / bare", value=production / bare, unit="x", limit=MIN_RATIO, at_most=False),
        Figure(name="production, median", value=production, unit="steps/s"),
        Figure(name="bare PyTorch, median", value=bare, unit="steps/s"),
        Figure(name="agent and its daemon, on average", value=timed.agent_cores, unit="cores"),
    )


def _alternate(
    ours: Callable[[int], None], bare: Callable[[int], None], blocks: int, steps: int, say: Say
) -> LoopRates:
    timed = LoopRates([], [])
    for block in range(blocks):
        for run, rates in ((ours, timed.production), (bare, timed.bare)):
            began = time.perf_counter()
            run(steps)
            rates.append(steps / (time.perf_counter() - began))
        say(f"block {block + 1} of {blocks}: {timed.production[-1]:.1f} and {timed.bare[-1]:.1f} steps/s")
    return timed


def _production(peer: Peer, hooks: PeerHooks) -> Callable[[int], None]:
    def run(steps: int) -> None:
        train(peer.trainer, islice(peer.batches, steps), peer.sync, hooks)

    return run


def _bare(peer: Peer) -> Callable[[int], None]:
    model = copy.deepcopy(peer.model).train()
    inner = peer.manifest.inner
    optimizer = plain_adamw(model, inner)
    batches = Batches(peer.text.train, peer.text.batch_sequences, peer.batches.state.seed)

    def run(steps: int) -> None:
        bare_loop(model, optimizer, batches, inner, steps)

    return run


@contextlib.contextmanager
def _peer(folder: Path, seed: int) -> Iterator[tuple[Peer, PeerHooks]]:
    """What `atoll join` builds, up to the first step, in a run whose next round is far away."""
    manifest = yaml.safe_load(manifest_text(SWARM_ROUNDS, seed))
    manifest["recipe"]["steps_per_round"] = STEPS_BETWEEN_ROUNDS
    bootstrap = BootstrapProcess(folder / "bootstrap", yaml.safe_dump(manifest))
    home = folder / "peer"
    home.mkdir()
    agent = AgentProcess(home / "agent.log")
    try:
        chosen = {"output_dir": home, "device": "cpu", "save_steps": 0, "eval_every_rounds": 0, "data_seed": seed}
        settings = load_settings({**chosen, "host_maddrs": LOOPBACK}, None, {})
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
        published: Published = agent.expect(Published, TIMEOUT_S)
        plan = plan_of(published)
        peer = assemble(
            settings, start, published, plan, agent, lambda message: hooks.on_message(message), lambda: False
        )
        agent.send(peer.mapped)
        title = plan.manifest.name
        with LiveSwarm(Console(quiet=True), title=title, live=False) as table:
            hooks = PeerHooks(peer, MetricsFile(home / "metrics.jsonl"), table, lambda: False)
            peer.sync.begin(agent.expect(Anchor, TIMEOUT_S))
            yield peer, hooks
    finally:
        agent.close()
        bootstrap.close()


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
