"""How long a training loop waits between two rounds: for hand-over, merge, and checkpoints on a fast or slow disk."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from peer.demo.folder import manifest_text
from tests.network.bootstraps import BootstrapProcess
from tests.network.processes import JoinedPeer
from tests.shims import SLOW_DISK, preload

NAME = "pauses"
ABOUT = "Two peers with real rounds on one machine: the share of its time that each training loop waits"
FAST, SLOW = "fast disk", "slow disk"
STEPS_PER_ROUND, WARM_UP_ROUNDS = 60, 1
MORE_ROUNDS = 1000
LIMIT_PERCENT = 1.0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Two `atoll join` on a few lines of text, the quickstart's model but wider, one torch thread each, a round\n"
        "every 60 steps and a checkpoint every 30. One of them writes its folder through a library that delays each\n"
        "write to --disk-mb-per-s. Waiting for a hand-over or a merge is what the loop itself counts; what a\n"
        "checkpoint costs is how much longer its steps took than the median step of the same peer.",
    )
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="rounds to watch (default: 6)")
    parser.add_argument("--hidden", type=int, default=256, metavar="N", help="width of the model (default: 256)")
    parser.add_argument(
        "--disk-mb-per-s", type=int, default=4, metavar="MB", help="of the slow disk; 4 (default) is a tired SD card"
    )
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Run the two peers."""
    for flag in ("rounds", "hidden", "disk_mb_per_s"):
        check_count(f"--{flag.replace('_', '-')}", getattr(arguments, flag), 1)
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as name:
        folder = Path(name)
        shim = preload(folder, SLOW_DISK) | {
            "SLOW_BELOW": str(folder / "slow"), "SLOW_BYTES_PER_S": str(arguments.disk_mb_per_s * 1_000_000)
        }  # fmt: skip
        flags = ("--save-steps", str(STEPS_PER_ROUND // 2), "--save-total-limit", "2", "--torch-threads", "1")
        manifest = _manifest(arguments.seed, arguments.hidden)
        with (
            closing(BootstrapProcess(folder / "bootstrap", manifest)) as bootstrap,
            closing(JoinedPeer(folder / "fast", bootstrap.address, *flags)) as fast,
            closing(JoinedPeer(folder / "slow", bootstrap.address, *flags, env=shim)) as slow,
        ):
            peers = {FAST: fast, SLOW: slow}
            for number in range(1, WARM_UP_ROUNDS + arguments.rounds + 1):
                for peer in peers.values():
                    _wait_for(peer, number)
                say(f"round {number} of {WARM_UP_ROUNDS + arguments.rounds}")
            events = {name: peer.events("step") for name, peer in peers.items()}
    samples = {name: waits(steps, STEPS_PER_ROUND // 2) for name, steps in events.items()}
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(samples), samples=samples,
        options=("--rounds", str(arguments.rounds), "--hidden", str(arguments.hidden),
                 "--disk-mb-per-s", str(arguments.disk_mb_per_s)),
    )  # fmt: skip


def _wait_for(peer: JoinedPeer, round: int) -> None:
    peer.wait_for(lambda: peer.round >= round, timeout_s=300.0)


def _manifest(seed: int, hidden: int) -> str:
    manifest = yaml.safe_load(manifest_text(MORE_ROUNDS, seed))
    manifest["model"]["config"] |= {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    manifest["recipe"]["steps_per_round"] = STEPS_PER_ROUND
    return yaml.safe_dump(manifest)


def waits(steps: Sequence[Mapping[str, Any]], save_steps: int) -> dict[str, float]:
    """Seconds of one peer after its first round.

    Args:
        steps: the events of a peer, one for each step, with their times.
        save_steps: a checkpoint is begun at each multiple.
    """
    steps = [event for event in steps if event["round"] >= WARM_UP_ROUNDS]
    first, last = steps[0], steps[-1]
    lasted = {later["step"]: later["time"] - event["time"] for event, later in pairwise(steps)}
    usual = median(list(lasted.values()))
    beside = [s for step, s in lasted.items() if step % save_steps in (0, 1)]
    return {
        "seconds": last["time"] - first["time"],
        "hand_over_s": last["handover_wait_s"] - first["handover_wait_s"],
        "longest_hand_over_s": last["longest_handover_s"],
        "step_s": usual,
        "checkpoints": len(beside) / 2,
        "checkpoints_s": sum(beside) - usual * len(beside),
        "longest_checkpoint_s": max(beside) - usual,
        "data_s": last["data_wait_s"] - first["data_wait_s"],
    }


def figures(samples: Mapping[str, Mapping[str, float]]) -> tuple[Figure, ...]:
    """Shares of each peer's time, and the longest wait."""
    found = []
    for name, one in samples.items():
        for what, key in (("hand-over and merge", "hand_over_s"), ("checkpoints", "checkpoints_s")):
            share = 100 * one[key] / one["seconds"]
            found.append(Figure(name=f"{name}: {what}, of the time", value=share, unit="%", limit=LIMIT_PERCENT))
        found += [
            Figure(name=f"{name}: longest hand-over", value=1e3 * one["longest_hand_over_s"], unit="ms"),
            Figure(name=f"{name}: longest at a checkpoint", value=1e3 * one["longest_checkpoint_s"], unit="ms"),
            Figure(name=f"{name}: step, median", value=1e3 * one["step_s"], unit="ms"),
        ]
    return tuple(found)


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
