"""What one GPU makes of a training step: one command of at most 8 minutes, without any network."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import devices
from benchmarks.contestants import SYSTEMS, Work, ours
from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, median, run_benchmark
from benchmarks.gpu_round import RoundOnCard, round_on_card
from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.protocol.manifest import InnerSpec, ModelSpec
from peer.run.devices import devices_of
from peer.train.compute import Compute, is_out_of_memory
from peer.train.device import pick_device
from peer.train.model import build_model
from peer.train.precision import Precision, autocast
from peer.train.utilisation import flops_per_token, peak_flops

NAME = "gpu"
ABOUT = "Steps on one GPU beside a compiled loop by hand and transformers' Trainer, and rounds of two peers on it"
MINUTES = 8.0
CODECS = ("int8", "int2")
CHECK_STEPS, MAX_LOSS_RATIO = 30, 1.05
INT8_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """A llama, and the steps to make of it."""

    config: dict[str, Any]
    tokens: int
    micro_batch: int
    step: int
    steps: int


def _llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }  # fmt: skip


SIZES = {
    "150M": Size(config=_llama(768, 2048, 18, 12, 12, 32_000), tokens=2048, micro_batch=8, step=16, steps=10),
    "1B": Size(config=_llama(2048, 8192, 16, 32, 8, 128_256), tokens=2048, micro_batch=4, step=8, steps=6),
}
TINY = {"tiny": Size(config=_llama(32, 64, 2, 2, 2, 300), tokens=32, micro_batch=2, step=4, steps=2)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system at one size. `mfu` is None for a card whose peak is not known, `peak_gb` where nothing counts it."""

    size: str
    recomputed: bool
    system: str
    tokens_per_s: float
    mfu: float | None
    peak_gb: float | None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Llamas of 150M and 1B parameters in bf16, compiled, with and without recomputation: tokens per second, model\n"
        "FLOP utilisation (docs/training.md) and peak memory. Two peers on the card through real rounds. Codecs on\n"
        "the card and on the CPU. Checks that bf16 and fp16 learn as fp32 does. What no time is left for is named.",
    )
    parser.add_argument("--device", default="auto", help="as of atoll join (default: auto)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"in all (default: {MINUTES:g})")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to see that it works")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Rows, rounds, codecs, checks; those that matter most come first."""
    until = time.monotonic() + 60.0 * arguments.minutes
    device = pick_device(arguments.device)
    if device.type == "cpu" and not arguments.tiny:
        raise UserError("no GPU is at hand", "run it on a machine with one, or give --tiny to see that it works")
    precision = _precision(device)
    compute = Compute(precision=precision, compiled=not arguments.no_compile)
    checks = {kind: _check(device, kind, arguments.seed) for kind in ("bf16", "fp16") if _able(device, kind)}
    say("checks: " + ", ".join(f"{kind} {ratio:.3f} of fp32's loss" for kind, ratio in checks.items()))
    speeds = _codec_speeds(device, 2**12 if arguments.tiny else 2**26)
    rounds, left = [], []
    for name in CODECS:
        if time.monotonic() > until:
            left.append(f"rounds with {name}")
            continue
        with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder:
            rounds.append(round_on_card(Path(folder), str(device), precision, name, tiny=arguments.tiny))
        say(f"two peers, {name}: round {rounds[-1].round_s:.2f} s, pause {1e3 * rounds[-1].pause_s:.0f} ms")
    rows = []
    for name, size, recomputed, system in _cases(TINY if arguments.tiny else SIZES):
        title = f"{name}, {system}{', recomputed' if recomputed else ''}"
        if time.monotonic() > until:
            left.append(title)
            continue
        chosen = replace(compute, micro_batch=size.micro_batch, checkpointing=recomputed)
        row = _row(name, size, system, chosen, device, arguments.seed)
        say(f"{title}: " + ("out of memory" if row is None else f"{row.tokens_per_s:.0f} tokens/s"))
        if row is None:
            left.append(f"{title} (out of memory)")
        else:
            rows.append(row)
    several, samples = _several_cards(arguments, until, left, say)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=(*figures(rows, rounds, speeds, checks), *several),
        samples={"rows": [asdict(row) for row in rows], "rounds": [asdict(found) for found in rounds], "card": card,
                 **samples},
        notes=f"On {card}, {precision}." + (f" Not measured: {'; '.join(left)}." if left else ""),
    )  # fmt: skip


def _several_cards(
    arguments: argparse.Namespace, until: float, left: list[str], say: Say
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """All cards of the machine as one peer, under DDP and FSDP2, if there are several: see `benchmarks.devices`."""
    names = devices_of("cpu:2" if arguments.tiny else "all")
    sizes = "--hidden 64 --layers 1 --pairs 1 --steps 1" if arguments.tiny else "--hidden 768 --layers 18 --tokens 1024"
    if len(names) == 1 or time.monotonic() > until:
        left.extend(["several cards"] if len(names) > 1 else [])
        return (), {}
    sized = devices.build_parser().parse_args([*sizes.split(), "--rows", str(8 * len(names))])
    figures, samples = devices.on_devices(sized, names, say)
    return figures, {"devices": samples}


def figures(
    rows: list[Row], rounds: list[RoundOnCard], speeds: dict[str, float], checks: dict[str, float]
) -> tuple[Figure, ...]:
    """Every row; ours beside the others of the same size."""
    found = []
    for row in rows:
        name = f"{row.size}, {row.system}{', recomputed' if row.recomputed else ''}"
        found.append(Figure(name=f"{name}: speed", value=row.tokens_per_s, unit="tokens/s"))
        if row.mfu is not None:
            found.append(Figure(name=f"{name}: utilisation", value=row.mfu, unit=""))
        if row.peak_gb is not None:
            found.append(Figure(name=f"{name}: peak memory", value=row.peak_gb, unit="GB"))
        same = [r for r in rows if (r.size, r.recomputed) == (row.size, row.recomputed)]
        ours_too = next((r for r in same if r.system == "ours alone"), None)
        if row.system != "ours alone" and ours_too is not None:
            ratio, limit = ours_too.tokens_per_s / row.tokens_per_s, 0.99 if row.system == "by hand" else 1.0
            found.append(Figure(name=f"{name}: ours against it", value=ratio, unit="x", limit=limit, at_most=False))
    for one in rounds:
        found.append(Figure(name=f"round, {one.codec}", value=one.round_s, unit="s"))
        found.append(Figure(name=f"longest pause of a step, {one.codec}", value=one.pause_s, unit="s"))
        share = one.paused_share
        found.append(Figure(name=f"paused between rounds, {one.codec}", value=share, unit="", limit=0.01))
    found += [Figure(name=name, value=speed, unit="GB/s") for name, speed in speeds.items()]
    found += [Figure(name=f"{kind}: loss / that of fp32", value=ratio, unit="x", limit=MAX_LOSS_RATIO)
              for kind, ratio in checks.items()]
    return tuple(found)


def _cases(sizes: dict[str, Size]) -> list[tuple[str, Size, bool, str]]:
    systems = ("ours alone", "by hand", "transformers")
    return [(name, size, again, system)
            for name, size in sizes.items() for again in (False, True) for system in systems]


def _row(name: str, size: Size, system: str, compute: Compute, device: torch.device, seed: int) -> Row | None:
    """None: out of memory."""
    model = _model(size.config, device, seed)
    work = _work(size, compute, device, seed)
    flops, peak = flops_per_token(model, size.tokens), peak_flops(device, compute.precision)
    try:
        run = SYSTEMS[system](model, work)
        run(2)  # compiles
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rate = size.steps * work.tokens_per_step / run(size.steps)
        peak_gb = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    except (RuntimeError, UserError) as error:
        if not (isinstance(error, UserError) or is_out_of_memory(error)):
            raise
        return None
    finally:
        model = run = None  # type: ignore[assignment]
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    mfu = None if peak is None else rate * flops / peak
    return Row(size=name, recomputed=compute.checkpointing, system=system, tokens_per_s=rate, mfu=mfu, peak_gb=peak_gb)


def _model(config: dict[str, Any], device: torch.device, seed: int) -> PreTrainedModel:
    model = build_model(ModelSpec(architecture="llama", config=config), 259, seed)
    model.to(device)  # type: ignore[arg-type]
    return model


def _work(size: Size, compute: Compute, device: torch.device, seed: int) -> Work:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, size.config["vocab_size"], (2 * size.step, size.tokens + 1), generator=generator)
    return Work(rows_nt=rows, inner=InnerSpec(batch_sequences=size.step), compute=compute, device=device)


def _check(device: torch.device, precision: Precision, seed: int) -> float:
    """Loss after some steps on one batch, over that of fp32."""
    size = Size(config=_llama(64, 128, 2, 2, 2, 300), tokens=32, micro_batch=4, step=4, steps=CHECK_STEPS)

    def loss(kind: Precision) -> float:
        model = _model(size.config, device, seed)
        work = _work(size, Compute(precision=kind), device, seed)
        ours(model, replace(work, rows_nt=work.rows_nt[:4], inner=InnerSpec(batch_sequences=4)))(CHECK_STEPS)
        batch = work.rows_nt[:4].to(device)
        with torch.no_grad():
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()

    return loss(precision) / loss("fp32")


def _codec_speeds(device: torch.device, numel: int) -> dict[str, float]:
    """GB/s of fp32 in: the production codecs, which run on the CPU, and int8 in blocks by torch on the device."""
    x = torch.randn(numel)
    speeds = {f"{name}, encode on the CPU": _speed(partial(codec(name).encode, x), numel) for name in CODECS}
    on_device = x.to(device)

    def blocks() -> torch.Tensor:
        rows = on_device.view(-1, INT8_BLOCK)
        quantized = (rows / (rows.abs().amax(1, keepdim=True) / 127.0).clamp_min_(1e-30)).round_().to(torch.int8)
        return quantized.cpu()

    return {**speeds, f"int8 in blocks on {device.type}, to the host": _speed(blocks, numel)}


def _speed(encode: Callable[[], object], numel: int, repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        encode()
        seconds.append(time.perf_counter() - began)
    return 4e-9 * numel / median(seconds[1:])


def _able(device: torch.device, precision: Precision) -> bool:
    try:
        autocast(device, precision)
    except UserError:
        return False
    return True


def _precision(device: torch.device) -> Precision:
    """bf16, or what there is instead."""
    if _able(device, "bf16"):
        return "bf16"
    return "fp32" if device.type == "cpu" else "fp16"


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
