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
    names, figures, samples = devices_of(arguments.devices), list[Figure](), {}
    for label, used, sharded in (("1", names[:1], False), ("ddp", names, False), ("fsdp", names, True)):
        if label != "1" and len(names) == 1:
            continue
        title = "1 device" if label == "1" else f"{len(used)} devices, {label}"
        row = _run(arguments, used, sharded, "both")
        alone = {system: _run(arguments, used, sharded, system)["peak_mb"] for system in ("ours", "plain")}
        ratio = median([plain / ours for ours, plain in zip(row["ours"], row["plain"], strict=True)])
        figures += [
            Figure(name=f"{title}: steps a second", value=1 / median(row["ours"]), unit="/s"),
            Figure(name=f"{title}: speed, of plain torch's", value=ratio, unit="x"),
            Figure(name=f"{title}: peak of rank 0", value=alone["ours"], unit="MB"),
            Figure(name=f"{title}: peak of rank 0, plain torch", value=alone["plain"], unit="MB"),
            Figure(name=f"{title}: pause of a hand-over", value=1e3 * row["pause_s"], unit="ms"),
        ]
        samples[title] = {**row, "alone_mb": alone}
        say(f"{title}: {1 / median(row['ours']):.2f} steps/s, {ratio:.2f} of plain torch")
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(figures), samples=samples)


def _run(arguments: argparse.Namespace, devices: list[str], sharded: bool, system: str) -> dict[str, Any]:
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
            output, _ = ranks[0].communicate(timeout=TIMEOUT_S)
            codes = [rank.wait(60.0) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(codes):
        raise UserError(f"a rank ended with exit code {max(codes)}", "its messages are above")
    found: dict[str, Any] = json.loads(output)
    return found


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
