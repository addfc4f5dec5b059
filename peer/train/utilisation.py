"""How much of a device's arithmetic the model uses, and how long a loop waits for its batches."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from peer.system.clock import Clock
from peer.system.resources import resident_memory
from peer.train.four_bit import count_values
from peer.train.precision import Precision

T = TypeVar("T")
# TFLOP/s of dense matrix products as the makers publish them: bf16 or fp16 with fp32 sums, and TF32.
PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "B200": (2250.0, 1100.0), "H200": (989.0, 494.0), "H100 PCIe": (756.0, 378.0), "H100": (989.0, 494.0),
    "A100": (312.0, 156.0), "A800": (312.0, 156.0), "L40S": (362.0, 183.0), "L4": (121.0, 60.0), "A10": (125.0, 62.5),
    "A6000": (155.0, 77.0), "V100": (125.0, 15.7), "T4": (65.0, 8.1),
    "RTX 5090": (209.0, 105.0), "RTX 4090": (165.0, 82.6), "RTX 4080": (97.5, 48.7), "RTX 3090": (71.0, 35.6),
}  # fmt: skip


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Of forward and backward pass, without recomputation: 6 N + 6 L H T.

    N: parameters that multiply, which embedding tables do not, unless the head shares them; of experts, those that a
    token uses. L: layers, H: width, T: tokens of a sequence, of which causal attention looks at half
    (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, halved for the mask).
    """
    text = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    if head is not None and embedding is not None and head.weight is embedding.weight:
        tables.discard(id(embedding.weight))
    experts, chosen = _experts(text)
    multiplying = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables:
            multiplying += count_values(parameter) * (chosen / experts if ".experts." in name else 1.0)
    layers, width = (getattr(text, key, 0) or 0 for key in ("num_hidden_layers", "hidden_size"))
    return 6.0 * multiplying + 6.0 * layers * width * sequence_length


def _experts(text: object) -> tuple[int, int]:
    """-> (experts of a layer, those that a token uses)"""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((found for name in names if isinstance(found := getattr(text, name, None), int) and found), 1)
    chosen = getattr(text, "num_experts_per_tok", None)
    return total, min(total, chosen) if isinstance(chosen, int) else total


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """What a known card can do in one second; None for others, and for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((peaks for part, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)
    return None if known is None else 1e12 * known[1 if precision == "fp32" else 0]


def memory_used(device: torch.device) -> int:
    """Bytes: the most that tensors took on a CUDA device so far, else this process's RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_memory()


class Throughput:
    """Tokens per second, and the share of the device's arithmetic, since the last time it was asked.

    Args:
        flops: of one token.
        peak: of the device in one second, if it is known.
    """

    def __init__(self, flops: float, peak: float | None, clock: Clock = time.perf_counter) -> None:
        self._flops, self._peak, self._clock = flops, peak, clock
        self._at, self._tokens = clock(), 0

    def since_last(self, tokens: int) -> dict[str, float | None]:
        """For the metrics of a step, given the tokens trained so far."""
        now = self._clock()
        rate = (tokens - self._tokens) / max(1e-9, now - self._at)
        self._at, self._tokens = now, tokens
        done = rate * self._flops
        return {
            "recent_tokens_per_s": rate,
            "model_tflops_per_s": done / 1e12,
            "mfu": None if self._peak is None else done / self._peak,
        }


class TimedBatches(Generic[T]):
    """The same batches.

    Attributes:
        seconds: that were spent on waiting for them.
    """

    def __init__(self, batches: Iterable[T], clock: Clock = time.perf_counter) -> None:
        self._batches, self._clock = iter(batches), clock
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = self._clock()
        try:
            return next(self._batches)
        finally:
            self.seconds += self._clock() - began
