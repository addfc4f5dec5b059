"""A reduction is the same on every processor: older ones and newer ones run tensor operations to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import torch

from peer.outer.aggregate.base import Aggregator
from peer.outer.aggregate.reduce import reduce_shard
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.registry import COMPRESSORS, compressor
from peer.outer.compress.residual import Residual
from peer.outer.numerics import kernels
from peer.outer.recipe.recipe import PARTS
from peer.protocol.hashing import digest

NUMEL = 70_001
INSTRUCTIONS = ("default", "avx2", "avx512")  # as ATEN_CPU_CAPABILITY names them, older ones first


def digests() -> dict[str, str]:
    """Of every dense codec's reduction with error feedback, round after round, and of every aggregator's."""
    rng = np.random.default_rng(3)  # torch's own depends on the processor
    common = rng.standard_normal(NUMEL, np.float32)
    vectors = [torch.from_numpy(common + rng.standard_normal(NUMEL, np.float32) ** 3) for _ in range(4)]
    found, weights = {}, [3, 5, 7, 1000]
    for name in COMPRESSORS:
        codec, residual = compressor(name), Residual(ErrorFeedback(decay=0.95), NUMEL)
        payloads = [codec.encode(vector) for vector in vectors]
        for round in range(3):
            reduced, _ = reduce_shard(
                payloads, weights, NUMEL, codec, encode=lambda n, read, codec=codec, residual=residual:
                residual.encode(codec, 0, n, read),
            )  # fmt: skip
            residual.commit()
            found[f"{name}, round {round}"] = digest(reduced, residual.vector.numpy().tobytes()).hex()
    codec = compressor("int8")
    payloads = [codec.encode(vector) for vector in vectors]
    for name, part in PARTS["aggregator"].items():
        aggregator: Aggregator = part()
        found[name] = digest(reduce_shard(payloads, weights, NUMEL, codec, aggregator)[0]).hex()
    return found


def instructions_here() -> tuple[str, ...]:
    """Those of INSTRUCTIONS that this processor has: told to use others, torch dies of them."""
    newest = torch.backends.cpu.get_cpu_capability().lower()
    return INSTRUCTIONS[: INSTRUCTIONS.index(newest) + 1] if newest in INSTRUCTIONS else INSTRUCTIONS[:1]


def test_no_reduction_depends_on_the_processor() -> None:
    chosen = instructions_here()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.outer.numerics.test_processors"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "ATEN_CPU_CAPABILITY": instructions, "OMP_NUM_THREADS": "1"},
        )
        for instructions in chosen
    ]  # fmt: skip
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0] * len(chosen), chosen
    answers = list(map(json.loads, outputs))
    assert len(answers[0]) == 3 * len(COMPRESSORS) + len(PARTS["aggregator"])
    expected = digests()
    for instructions, answer in zip(chosen, answers, strict=True):
        assert answer == expected, instructions


if __name__ == "__main__":
    with mock.patch.object(kernels, "compiled", return_value=None):
        json.dump(digests(), sys.stdout)
