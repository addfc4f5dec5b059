"""Text as it is streamed for training, against `datasets` and a DataLoader of the same work."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, median, run_benchmark
from peer.data.batches import Batches
from peer.data.corpus import Corpus, ReadingOptions, open_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.protocol.manifest import DataSpec, FileSpec, InnerSpec, ModelSpec, SourceSpec
from peer.train.model import build_model
from peer.train.optim import build_optimizer
from peer.train.step import Trainer

NAME = "data"
ABOUT = "A corpus of parquet and jsonl.gz over HTTP on loopback, made into batches, against datasets and a DataLoader"
NOTES = """\
Both make batches of 8 sequences of 128 byte-level tokens with one process beside the trainer's. `datasets` reads the
same files from the disk, since it would need another package to read them over HTTP: that is in its favour. A block
reads 4M tokens that were not read before; the two take turns. Memory is what the reading processes and this one
hold at most (proportional set size), beyond what this one held before."""
SHARDS, ROW_GROUP, LENGTH, BATCH, BLOCK_TOKENS = 4, 2000, 128, 8, 4_000_000
MAX_MB, FIRST_S, WAIT_SHARE = 300.0, 10.0, 0.01


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME, "Makes a corpus of text from the standard library's source, serves it on loopback, streams it."
    )
    parser.add_argument("--gigabytes", type=float, default=5.0, metavar="N", help="of text (default: 5)")
    parser.add_argument("--blocks", type=int, default=6, metavar="N", help="of each of the two (default: 6)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of a 1M trainer (default: 60)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Measure one corpus."""
    if arguments.gigabytes < 0.01 or arguments.blocks < 1 or arguments.steps < 1:
        raise UserError("--gigabytes must be at least 0.01, --blocks and --steps at least 1", "see --help")
    with tempfile.TemporaryDirectory(prefix="atoll-data-") as name:
        folder = Path(name)
        digests = make_corpus(folder / "files", int(arguments.gigabytes * 1e9), arguments.seed, say)
        with serving(folder / "files") as url:
            files = tuple(FileSpec(url=f"{url}/{file}", sha256=digest) for file, digest in sorted(digests.items()))
            spec = DataSpec(
                sources=tuple(
                    SourceSpec(kind="web", files=tuple(file for file in files if file.url.endswith(suffix)))
                    for suffix in (".parquet", ".jsonl.gz")
                ),
                sequence_length=LENGTH, validation_fraction=0.01, validation_tokens=65_536,
            )  # fmt: skip
            return _measured(spec, folder, arguments, say)


def _measured(spec: DataSpec, folder: Path, arguments: argparse.Namespace, say: Say) -> BenchReport:
    before, began = _memory([]), time.monotonic()
    options = ReadingOptions(cache=folder / "cache", hub_headers={}, private_urls=True)
    corpus = open_corpus(spec, ByteTokenizer(), options, BATCH)
    try:
        ours = Batches(corpus.sources, BATCH, arguments.seed)
        next(ours)
        first_s = time.monotonic() - began
        say(f"first batch after {first_s:.1f} s")
        theirs = baseline(sorted(str(path) for path in (folder / "files").iterdir()))
        next(theirs)
        rates: dict[str, list[float]] = {"ours": [], "datasets": []}
        highest = 0.0
        for block in range(arguments.blocks):
            for kind in ("ours", "datasets") if block % 2 else ("datasets", "ours"):
                rates[kind].append(_rate(ours if kind == "ours" else theirs, BLOCK_TOKENS))
                if kind == "ours":
                    highest = max(highest, _memory(corpus.workers.process_ids if corpus.workers else []) - before)
            newest = ", ".join(f"{kind} {found[-1] / 1e6:.2f}M tokens/s" for kind, found in rates.items())
            say(f"block {block + 1}: {newest}")
        waited = trained(corpus, arguments.steps, arguments.seed)
    finally:
        corpus.close()
    ratios = [one / other for one, other in zip(rates["ours"], rates["datasets"], strict=True)]
    figures = (
        Figure(name="peak memory", value=highest, unit="MB", limit=MAX_MB),
        Figure(name="first batch", value=first_s, unit="s", limit=FIRST_S),
        Figure(name="tokens/s", value=median(rates["ours"]), unit="tokens/s"),
        Figure(name="against datasets and DataLoader", value=median(ratios), unit="x", limit=1.0, at_most=False),
        Figure(name="a 1M trainer waits", value=100 * waited, unit="%", limit=100 * WAIT_SHARE),
    )
    command = tuple(f"--{key} {getattr(arguments, key):g}" for key in ("gigabytes", "blocks", "steps"))
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures, samples={"rates": rates}, notes=NOTES,
        options=command,
    )  # fmt: skip


def make_corpus(folder: Path, size: int, seed: int, say: Say) -> dict[str, str]:
    """Files with so many bytes of text in all, half of it parquet; -> name -> SHA-256."""
    folder.mkdir()
    rng = random.Random(seed)
    root = Path(sysconfig.get_path("stdlib"))
    pool = "\n".join(path.read_text(errors="replace") for path in sorted(root.glob("*.py")))
    each = size // (2 * SHARDS)

    def rows() -> Iterator[dict[str, str]]:
        made = 0
        while made < each:
            length, start = rng.randrange(200, 6000), rng.randrange(len(pool) - 6000)
            made += length
            yield {"text": pool[start : start + length]}

    for number in range(SHARDS):
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(folder / f"{number}.parquet", schema) as writer:
            texts = rows()
            while batch := list(islice(texts, ROW_GROUP)):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
        with gzip.open(folder / f"{number}.jsonl.gz", "wt", compresslevel=1) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows())
        say(f"{number + 1} of {SHARDS} pairs of files made")
    return {path.name: hashlib.file_digest(path.open("rb"), "sha256").hexdigest() for path in folder.iterdir()}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The folder at a URL, from a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.file_server", str(folder)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def baseline(files: list[str]) -> Iterator[torch.Tensor]:
    """What one writes with `datasets`: both formats streamed and interleaved, tokenised and packed in one worker."""
    tokenizer, eos = ByteTokenizer(), np.array([ByteTokenizer.eos_id], dtype=np.int32)

    def packed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = np.concatenate([part for text in rows["text"] for part in (tokenizer.encode(text), eos)])
        return {"ids": list(np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)[::LENGTH])}

    formats = [
        datasets.load_dataset(kind, data_files=[file for file in files if file.endswith(suffix)], split="train",
                              streaming=True)
        for kind, suffix in (("parquet", ".parquet"), ("json", ".jsonl.gz"))
    ]  # fmt: skip
    mixed = datasets.interleave_datasets(formats)
    rows = mixed.map(packed, batched=True, batch_size=256, remove_columns=["text"]).with_format("torch")
    loader = DataLoader(rows, batch_size=BATCH, num_workers=1, prefetch_factor=64)
    for batch in loader:
        yield batch["ids"]


def _rate(batches: Iterator[Any], tokens: int) -> float:
    """Tokens a second of the next batches."""
    count = max(1, tokens // (BATCH * LENGTH))
    began = time.monotonic()
    for _ in islice(batches, count):
        pass
    return count * BATCH * LENGTH / (time.monotonic() - began)


def trained(corpus: Corpus, steps: int, seed: int) -> float:
    """The share of its time that a trainer of about 1M parameters waits for text that was not read before."""
    model = build_model(
        ModelSpec(architecture="llama", config={
            "vocab_size": 264, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
        }), 264, seed,
    )  # fmt: skip
    inner = InnerSpec()
    trainer = Trainer(model.train(), build_optimizer(model, inner), inner, lambda: 1e-3)
    batches = Batches(corpus.sources, BATCH, seed + 1)
    next(batches)
    waited, began = 0.0, time.monotonic()
    for _ in range(steps):
        asked = time.monotonic()
        batch, _ = next(batches)
        waited += time.monotonic() - asked
        trainer.step(batch)
    return waited / (time.monotonic() - began)


def _memory(processes: list[int]) -> float:
    """MB of this process, without what is only mapped from files, and of others."""
    own = psutil.Process().memory_full_info()
    others = sum(int(psutil.Process(pid).memory_full_info().pss) for pid in processes)
    return (int(own.rss) - int(own.shared) + others) / 1e6


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
