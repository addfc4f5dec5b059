"""A reduction is the same on every processor: older ones and newer ones run tensor operations to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch

from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.registry import COMPRESSORS, compressor
from peer.outer.compress.residual import Residual
from peer.outer.math.aggregation import Aggregation
from peer.outer.numerics import kernels
from peer.outer.recipe.recipe import PARTS
from peer.outer.state.reduced_update import ReduceFormat
from peer.protocol.hashing import digest

NUMEL = 70_001
INSTRUCTIONS = ("default", "avx2", "avx512")  # as ATEN_CPU_CAPABILITY names them, older ones first


def reduce(
    wire: ReduceFormat, payloads: Sequence[bytes], aggregator: Aggregator, residual: Residual | None = None
) -> bytes:
    """Of the whole vector, as one slice."""
    return wire.reduce(Aggregation(aggregator, [3, 5, 7, 1000]), payloads, 0, NUMEL, residual)


def digests() -> dict[str, str]:
    """Of every dense codec's reduction with error feedback, round after round, and of every aggregator's."""
    rng = np.random.default_rng(3)  # torch's own depends on the processor
    common = rng.standard_normal(NUMEL, np.float32)
    vectors = [torch.from_numpy(common + rng.standard_normal(NUMEL, np.float32) ** 3) for _ in range(4)]
    found = {}
    for name in COMPRESSORS:
        wire, residual = ReduceFormat(NUMEL, compressor(name)), Residual(ErrorFeedback(decay=0.95), NUMEL)
        payloads = [wire.codec.encode(vector) for vector in vectors]
        for round in range(3):
            reduced = reduce(wire, payloads, Mean(), residual)
            residual.commit()
            found[f"{name}, round {round}"] = digest(reduced, residual.vector.numpy().tobytes()).hex()
    wire = ReduceFormat(NUMEL, compressor("int8"))
    payloads = [wire.codec.encode(vector) for vector in vectors]
    for name, part in PARTS["aggregator"].items():
        aggregator: Aggregator = part()
        found[name] = digest(reduce(wire, payloads, aggregator)).hex()
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
