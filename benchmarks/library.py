"""Steps of a script with `swarm.after_step` against the same script without, in one process, in turns."""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedModel

import atoll
from benchmarks.bare import plain_adamw
from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from peer.data.tokenizer import ByteTokenizer
from peer.demo.folder import manifest_text
from peer.genesis import build_initial_model
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.system.clock import Clock
from tests.network.bootstraps import BootstrapProcess
from tests.network.processes import LOOPBACK, JoinedPeer

NAME = "library"
ABOUT = "A script of one's own with `swarm.after_step` against the same script without: steps a second"
ROUNDS = 100_000
BARE, SWARM = "bare", "swarm"
LIMIT = 0.98
Rates = dict[str, list[float]]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Two copies of one model train in one process with one torch thread, block by block in turns: a loop that one\n"
        "writes by hand, and that loop with `swarm.after_step`, which has a round due every --round steps. Once the\n"
        "peer is alone in its run, and once with a peer of `atoll join` on the same machine.",
    )
    parser.add_argument("--blocks", type=int, default=12, metavar="N", help="blocks of each kind (default: 12)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps in a block (default: 40)")
    parser.add_argument("--round", type=int, default=40, metavar="N", help="steps of a round (default: 40)")
    parser.add_argument("--hidden", type=int, default=128, metavar="N", help="width of the model (default: 128)")
    parser.add_argument(
        "--processor-time", action="store_true", help="of this process's own, for a machine that has other work"
    )
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """The peer alone, then the pair, each in a run of its own."""
    for flag in ("blocks", "steps", "round", "hidden"):
        check_count(f"--{flag}", getattr(arguments, flag), 1)
    torch.set_num_threads(1)
    found: dict[str, Rates] = {}
    committed = 0
    for name, others in (("alone", 0), ("of a pair", 1)):
        with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder:
            say(f"a peer {name}")
            found[name], committed = _in_run(arguments, Path(folder), others, say)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(found, committed), samples=found,
        notes=(
            "A ratio is the median of those of the blocks: neighbours in time see the same machine. In the pair, two "
            "scripts and their agents share the cores: a round of one takes the time of the other's steps."
        )
        + (" Seconds are those of this process's processor time." if arguments.processor_time else ""),
        options=(
            "--blocks", str(arguments.blocks), "--steps", str(arguments.steps), "--round", str(arguments.round),
            "--hidden", str(arguments.hidden), *(["--processor-time"] if arguments.processor_time else []),
        ),
    )  # fmt: skip


def figures(found: dict[str, Rates], committed: int) -> tuple[Figure, ...]:
    """Ratios of neighbouring blocks, and the length of a step.

    Args:
        committed: rounds of the pair.
    """
    ratios = [
        Figure(name=f"{name}: with after_step / without", unit="x", limit=LIMIT, at_most=False,
               value=median([a / b for a, b in zip(rates[SWARM], rates[BARE], strict=True)]))
        for name, rates in found.items()
    ]  # fmt: skip
    steps = [
        Figure(name=f"{name}: step without, median", value=1e3 / median(rates[BARE]), unit="ms")
        for name, rates in found.items()
    ]
    return (*ratios, *steps, Figure(name="rounds of the pair", value=committed, unit="rounds"))


def _in_run(arguments: argparse.Namespace, folder: Path, others: int, say: Say) -> tuple[Rates, int]:
    """-> (steps a second of each block, committed rounds)"""
    document = yaml.safe_load(manifest_text(ROUNDS, arguments.seed))
    document["model"]["config"] |= {"hidden_size": arguments.hidden, "intermediate_size": 4 * arguments.hidden}
    document["recipe"]["steps_per_round"] = arguments.round
    manifest = parse_manifest(yaml.safe_dump(document), NAME)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    with ExitStack() as stack:
        bootstrap = stack.enter_context(closing(BootstrapProcess(folder / "bootstrap", yaml.safe_dump(document))))
        for number in range(others):
            flags = ("--torch-threads", "1", "--save-steps", "0")
            stack.enter_context(closing(JoinedPeer(folder / f"other{number}", bootstrap.address, *flags)))
        model = build_initial_model(manifest, ByteTokenizer())
        bare, own = _Script(copy.deepcopy(model), manifest), _Script(model, manifest)
        swarm = stack.enter_context(atoll.Swarm(
            bootstrap.address, own.model, own.optimizer, output_dir=folder / "peer", host_maddrs=LOOPBACK,
            nat_port_map=False,
        ))  # fmt: skip
        own.after = lambda loss: swarm.after_step(tokens=manifest.tokens_per_step, loss=loss)
        bare.run(arguments.steps, clock)
        while sum(record.status == "committed" for record in swarm.records) < others or swarm.peers <= others:
            own.run(arguments.steps, clock)  # until the group has met
        rates: Rates = {BARE: [], SWARM: []}
        for block in range(arguments.blocks):
            pair = [(BARE, bare), (SWARM, own)]
            for name, script in pair if block % 2 else reversed(pair):  # a machine may slow down within a block
                rates[name].append(arguments.steps / script.run(arguments.steps, clock))
            say(f"block {block + 1} of {arguments.blocks}: " + ", ".join(f"{n} {r[-1]:.1f}" for n, r in rates.items()))
        return rates, sum(record.status == "committed" for record in swarm.records)


class _Script:
    """A loop as one writes it by hand."""

    def __init__(self, model: PreTrainedModel, manifest: RunManifest) -> None:
        self.model, self.optimizer = model, plain_adamw(model, manifest.inner)
        self.after: Callable[[float], None] = lambda _: None
        shape = (16, manifest.inner.batch_sequences, manifest.data.sequence_length)
        self._batches: Tensor = torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(0))
        self._step = 0

    def run(self, steps: int, clock: Clock) -> float:
        """-> seconds"""
        began = clock()
        for _ in range(steps):
            ids_bt = self._batches[self._step % len(self._batches)]
            self._step += 1
            loss = self.model(input_ids=ids_bt, labels=ids_bt, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.after(loss.item())
        return clock() - began


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
