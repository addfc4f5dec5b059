"""Steps of one peer on several devices beside plain torch doing the same: `--devices all` where there are cards."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from peer.errors import UserError
from peer.run.devices import devices_of

NAME = "devices"
ABOUT = "Steps of a peer with several devices, beside torch's DistributedDataParallel and fully_shard"
TIMEOUT_S = 500.0
Rows = list[dict[str, Any]]  # one of each rank


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Each rank makes steps of a peer and of a loop by hand in alternation, on the same batches and in the same\n"
        "processes; memory is that of a second run with one of them alone.",
    )
    parser.add_argument("--devices", default="cpu:2", metavar="LIST", help="as of `atoll join` (default: cpu:2)")
    for name, value in (("hidden", 256), ("layers", 4), ("rows", 4), ("tokens", 128), ("pairs", 6), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default: {value}")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """One device, then all of them under both shardings."""
    check_count("--pairs", arguments.pairs, 1)
    figures, samples = on_devices(arguments, devices_of(arguments.devices), say)
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=figures, samples=samples)


def on_devices(
    arguments: argparse.Namespace, names: list[str], say: Say
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """The figures of these devices, and the samples behind them.

    Args:
        arguments: sizes, as of the command line.
    """
    figures, samples = list[Figure](), {}
    for label, used, sharded in (("1", names[:1], False), ("ddp", names, False), ("fsdp", names, True)):
        if label != "1" and len(names) == 1:
            continue
        title = "1 device" if label == "1" else f"{len(used)} devices, {label}"
        ranks = _run(arguments, used, sharded, "both")
        alone = {system: _run(arguments, used, sharded, system) for system in ("ours", "plain")}
        speed, ratio, *others = _figures(title, ranks, alone)
        figures += speed, ratio, *others
        peaks = {system: [one["peak_mb"] for one in own] for system, own in alone.items()}
        samples[title] = {"ranks": ranks, "alone_mb": peaks}
        say(f"{title}: {speed.value:.2f} steps/s, {ratio.value:.2f} of plain torch")
    return tuple(figures), samples


def _figures(title: str, ranks: Rows, alone: dict[str, Rows]) -> list[Figure]:
    """Of one way to use the devices; `alone`: with one of the two systems in memory."""
    first = ranks[0]
    ratio = median([plain / ours for ours, plain in zip(first["ours"], first["plain"], strict=True)])
    peaks = {system: max(one["peak_mb"] for one in own) for system, own in alone.items()}
    return [
        Figure(name=f"{title}: steps a second", value=1 / median(first["ours"]), unit="/s"),
        Figure(name=f"{title}: speed, of plain torch's", value=ratio, unit="x"),
        Figure(name=f"{title}: highest peak of a rank", value=peaks["ours"], unit="MB"),
        Figure(name=f"{title}: highest peak of a rank, plain torch", value=peaks["plain"], unit="MB"),
        Figure(name=f"{title}: pause of a hand-over", value=1e3 * first["hand_over_of_all_s"], unit="ms"),
        Figure(name=f"{title}: pause of a merge", value=1e3 * first["merge_of_all_s"], unit="ms"),
        *(Figure(name=f"{title}: its part on rank {rank}, {name}", value=1e3 * one[key], unit="ms")
          for name, key in (("hand-over", "hand_over_s"), ("merge", "merge_s"))
          for rank, one in enumerate(ranks) if len(ranks) > 1),
    ]  # fmt: skip


def _run(arguments: argparse.Namespace, devices: list[str], sharded: bool, system: str) -> Rows:
    """What each rank says."""
    with tempfile.TemporaryDirectory() as folder:
        shared = ["--store", f"file://{folder}/store", "--count", str(len(devices)), "--parent", str(os.getpid())]
        shared += ["--system", system, *(["--sharded"] if sharded else [])]
        for name in ("hidden", "layers", "rows", "tokens", "pairs", "steps"):
            shared += [f"--{name}", str(getattr(arguments, name))]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.device_rank", "--rank", str(rank), "--device", device, *shared],
                stdout=subprocess.PIPE,
            )
            for rank, device in enumerate(devices)
        ]
        try:
            said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if codes := {rank.returncode for rank in ranks} - {0}:
        raise UserError(f"a rank ended with exit code {max(codes)}", "its messages are above")
    return [json.loads(line) for line in said]


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
