from __future__ import annotations

import mmap
from itertools import count

import pytest
import torch

from peer.protocol.manifest import ModelSpec
from peer.system.resources import resident_memory
from peer.train.model import build_skeleton
from peer.train.utilisation import Throughput, TimedBatches, flops_per_token, memory_used, peak_flops
from tests.train.architectures import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LLAMA = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MATRICES = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64  # and the vectors of the norms


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_by_hand(tied):
    model = build_skeleton(ModelSpec(architecture="llama", config={**LLAMA, "tie_word_embeddings": tied}), 259)
    assert flops_per_token(model, 512) == 6 * (MATRICES + 300 * 64) + 6 * 3 * 64 * 512


def test_of_experts_those_count_that_a_token_uses():
    config = tiny_config("mixtral") | {"num_local_experts": 8, "num_experts_per_tok": 2}
    model = build_skeleton(ModelSpec(architecture="mixtral", config=config), 259)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    embedding = model.get_input_embeddings().weight.numel()
    others = sum(p.numel() for p in model.parameters()) - experts - embedding
    assert flops_per_token(model, 0) == pytest.approx(6 * (others + experts / 4))


def test_cards_are_known_by_their_names(monkeypatch):
    for name, bf16, tf32 in (
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12), ("NVIDIA H100 PCIe", 756e12, 378e12), ("Tesla T4", 65e12, 8.1e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12), ("NVIDIA L40S", 362e12, 183e12), ("NVIDIA L4", 121e12, 60e12),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert (peak_flops(CUDA, "bf16"), peak_flops(CUDA, "fp32")) == (bf16, tf32), name
    for name in ("Unheard Of 9000", "NVIDIA L40", "NVIDIA A10G"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(CUDA, "bf16") is None
    assert peak_flops(CPU, "fp32") is None


def test_throughput_is_of_the_time_since_the_last_question():
    ticks = iter([0.0, 2.0, 3.0])
    seen = Throughput(1e9, 4e12, lambda: next(ticks))
    assert seen.since_last(1000) == {"recent_tokens_per_s": 500.0, "model_tflops_per_s": 0.5, "mfu": 0.125}
    assert seen.since_last(3000) == {"recent_tokens_per_s": 2000.0, "model_tflops_per_s": 2.0, "mfu": 0.5}
    ticks = count()
    assert Throughput(1e9, None, lambda: next(ticks)).since_last(5)["mfu"] is None


def test_the_wait_for_batches_is_added_up():
    ticks = iter([0.0, 0.5, 7.0, 9.0, 10.0, 10.0])
    batches = TimedBatches([1, 2], lambda: next(ticks))
    assert list(batches) == [1, 2]
    assert batches.seconds == 2.5


def test_memory_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 77)
    assert memory_used(CUDA) == 77
    assert memory_used(CPU) == pytest.approx(resident_memory(), rel=0.2)
    before = resident_memory()
    with mmap.mmap(-1, 50_000_000) as taken:  # no allocator could serve it from what an earlier test freed
        taken.write(b"x" * len(taken))
        assert resident_memory() - before > 0.8 * len(taken)
