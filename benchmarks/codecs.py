"""Speed, size and error of every codec on one core, against a plain copy of the vector."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from peer.outer.compress.registry import COMPRESSORS, codec

NAME = "codecs"
ABOUT = "Codecs on one thread, GB/s of fp32 on the vector's side, against torch's copy into a warm vector"
EXPRESSIONS = (
    *COMPRESSORS,
    "top64/4096+int2",
    "top64/64x64+int2",
    "top32/4096+int8",
    "dct64+top32/4096+int8",
    "dct64+top4/64+sign",
    "threshold0.01+int8",
    "random0.01+fp32",
    "randomblock0.01+fp32",
)
LIMITS = {"int8": 2.0, "int4": 2.0, "top64/4096+int2": 0.5, "dct64+top32/4096+int8": 0.2}  # GB/s, each way
WIDTH = 1024
SEED_OF_ROUND = 3


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Encodes and decodes a matrix of Gaussian numbers whose rows differ in scale, and copies it in between.\n"
        "`copy_ratio` is the time of two copies over that of one encoding and one decoding; medians of all repeats.",
    )
    parser.add_argument("--megabytes", type=int, default=64, metavar="M", help="fp32 megabytes (default: 64)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each codec (default: 7)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """One row per codec."""
    check_count("--megabytes", arguments.megabytes, 1)
    check_count("--repeats", arguments.repeats, 1)
    rows_of_matrix = arguments.megabytes * (1 << 20) // (4 * WIDTH)
    x = layered(rows_of_matrix, arguments.seed)
    rows = []
    for expression in EXPRESSIONS:
        rows.append(row(expression, x, arguments.repeats))
        say(
            f"{expression}: {rows[-1]['encode_gb_s']:.2f} and {rows[-1]['decode_gb_s']:.2f} GB/s, "
            f"{rows[-1]['bits_per_value']:.3g} bits a value, relative error {rows[-1]['relative_error']:.3g}"
        )
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={"rows": rows})


def layered(rows: int, seed: int) -> Tensor:
    """Fp32 [rows * WIDTH]: Gaussian, each row with a log-normal scale of its own, as layers have."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(rows, 1, generator=generator).exp_()
    return torch.randn(rows, WIDTH, generator=generator).mul_(scales).flatten()


def row(expression: str, x: Tensor, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` after one warm-up; each repeat copies, encodes and decodes."""
    n = x.numel()
    parts = codec(expression).bind([(n // WIDTH, WIDTH)]).seeded(SEED_OF_ROUND)
    payload, target = parts.encode(x), torch.empty_like(x)
    error = parts.decode(payload, n).sub_(x).norm() / x.norm()
    seconds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    for _ in range(repeats):
        seconds["copy"].append(_timed(lambda: target.copy_(x)))
        seconds["encode"].append(_timed(lambda: parts.encode(x)))
        seconds["decode"].append(_timed(lambda: parts.decode(payload, n)))
    copy_s, encode_s, decode_s = (median(values) for values in seconds.values())
    return {
        "codec": expression,
        "numel": n,
        "encode_gb_s": 4e-9 * n / encode_s,
        "decode_gb_s": 4e-9 * n / decode_s,
        "copy_gb_s": 4e-9 * n / copy_s,
        "wire_bytes": len(payload),
        "bits_per_value": 8 * len(payload) / n,
        "relative_error": error.item(),
        "copy_ratio": 2 * copy_s / (encode_s + decode_s),
        "seconds": seconds,
    }


def figures(rows: list[dict[str, Any]]) -> tuple[Figure, ...]:
    """Both directions and the ratio of every codec, and the copy."""
    found = [Figure(name="copy, median over all codecs", value=median([r["copy_gb_s"] for r in rows]), unit="GB/s")]
    for r in rows:
        limit = LIMITS.get(r["codec"])
        for way in ("encode", "decode"):
            name = f"{r['codec']}, {way}"
            found.append(Figure(name=name, value=r[f"{way}_gb_s"], unit="GB/s", limit=limit, at_most=False))
        found.append(Figure(name=f"{r['codec']}, size", value=r["bits_per_value"], unit="bits/value"))
        found.append(Figure(name=f"{r['codec']}, both ways / two copies", value=r["copy_ratio"], unit="x"))
    assert all(math.isfinite(figure.value) for figure in found)
    return tuple(found)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
