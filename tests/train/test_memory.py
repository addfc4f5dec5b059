from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from peer.errors import UserError
from peer.train.compute import Compute
from peer.train.memory import SAVED_BYTES, Footprint, ModelSize, activation_bytes, check_memory
from peer.train.ranks import Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB, MILLION = 2**30, 1_000_000
WIDTH, TOKENS = 32, 2048
SAVED = {  # bytes of a token and a unit of width, where the feed-forward is four times as wide
    "gpt_neox": {"fp32": 65, "bf16": 35.4},
    "llama": {"fp32": 104.8, "bf16": 67.3},
    "opt": {"fp32": 57, "bf16": 37.4},
}
SIZE = ModelSize(parameters=MILLION, vocab_size=1000, hidden_size=64, layers=4)


def footprint(device=CPU, tokens=1, **choices) -> Footprint:
    return Footprint.of(SIZE, tokens, device, Compute(**choices))


def test_a_model_must_fit_with_its_moments_and_its_agent():
    kept = footprint().activations
    footprint().check(CPU, lambda _: 36 * MILLION + kept)
    with pytest.raises(UserError, match=r"1\.0M parameters needs 0\.03 GiB; 0\.03 GiB free on cpu"):
        footprint().check(CPU, lambda _: 36 * MILLION - 1)
    with pytest.raises(UserError, match=r"of them for activations; 0\.03 GiB free on cpu") as caught:
        footprint().check(CPU, lambda _: 36 * MILLION + kept - 1)
    assert "--per-device-train-batch-size" in caught.value.hint
    on_card = footprint(CUDA)
    on_card.check(CUDA, {CUDA: 24 * MILLION + on_card.activations, CPU: 20 * MILLION}.__getitem__)
    with pytest.raises(UserError, match="free on cuda:0"):
        on_card.check(CUDA, {CUDA: 24 * MILLION - 1, CPU: GIB}.__getitem__)
    with pytest.raises(UserError, match="free on cpu"):
        on_card.check(CUDA, {CUDA: GIB, CPU: 20 * MILLION - 1}.__getitem__)


def test_moments_of_one_byte_take_a_quarter():
    assert footprint().training - footprint(eight_bit=True).training == 6 * MILLION


@pytest.mark.parametrize("count", [2, 4, 8])
def test_several_devices_share_a_model_or_have_it_each_beside_one_outer_state(count):
    alone = footprint(CUDA)
    copies, parts = (footprint(CUDA, ranks=Ranks(0, count, sharded)) for sharded in (False, True))
    assert copies.training == 16 * MILLION  # weights, gradients and two moments
    assert parts.training == 16 * MILLION // count
    assert alone.training == 24 * MILLION  # with what a merge brings to the only card
    assert alone.agent == copies.agent == parts.agent == 20 * MILLION
    assert alone.activations == copies.activations == parts.activations
    assert footprint(CUDA, ranks=Ranks(0, count, True), eight_bit=True).training == 10 * MILLION // count
    copies, parts = (footprint(ranks=Ranks(0, count, sharded)) for sharded in (False, True))
    assert (copies.training, parts.training) == (count * 16 * MILLION, 16 * MILLION)  # all of them are in RAM
    assert copies.activations == parts.activations == count * footprint().activations
    assert copies.agent == parts.agent == 20 * MILLION
    enough = 16 * MILLION // count + alone.activations
    of_parts = footprint(CUDA, ranks=Ranks(0, count, True))
    of_parts.check(CUDA, {CUDA: enough, CPU: 20 * MILLION}.__getitem__)
    with pytest.raises(UserError, match="free on cuda:0"):
        of_parts.check(CUDA, {CUDA: enough - 1, CPU: GIB}.__getitem__)
    with pytest.raises(UserError, match="free on cuda:0"):
        footprint(CUDA, ranks=Ranks(0, count)).check(CUDA, {CUDA: enough, CPU: GIB}.__getitem__)


def test_what_will_be_used_is_said_with_what_is_free():
    on_cpu = Footprint(parameters=0, training=3 * GIB, activations=GIB // 2, agent=GIB)
    assert on_cpu.in_words(CPU, lambda _: 8 * GIB) == (
        "needs at least 4.50 of 8.00 GiB free on cpu (3.00 weights, gradients and moments, 0.50 activations, "
        "1.00 GiB of RAM for the agent)"
    )
    assert on_cpu.in_words(CUDA, {CUDA: 24 * GIB, CPU: 8 * GIB}.__getitem__) == (
        "needs at least 3.50 of 24.00 GiB free on cuda:0 (3.00 weights, gradients and moments, 0.50 activations), "
        "and 1.00 GiB of RAM for the agent of 8.00"
    )


def test_activations_grow_with_the_tokens_and_shrink_with_precision_and_recomputation():
    whole = activation_bytes(SIZE, 4096, CPU, Compute())
    assert whole == 4096 * (56 * 64 * 4 + 2 * 4 * 1000)
    half = activation_bytes(SIZE, 4096, CPU, Compute(precision="bf16"))
    assert half == 4096 * (34 * 64 * 4 + 2 * 4 * 1000)
    again = activation_bytes(SIZE, 4096, CPU, Compute(checkpointing=True))
    assert again == 4096 * (4 * 64 * 4 + 2 * 4 * 1000), "logits are larger than what one layer saves"
    wide = replace(SIZE, hidden_size=640)
    assert activation_bytes(wide, 4096, CPU, Compute(checkpointing=True)) == 4096 * (4 * 640 * 4 + 56 * 640)
    many = activation_bytes(SIZE, 2**20, CPU, Compute())
    assert many == 2**20 * (56 * 64 * 4) + 2 * 2**26, "logits are made in parts"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", sorted(SAVED))
def test_a_layer_saves_no_less_than_the_estimate(architecture, precision):
    two, four = (saved_bytes(architecture, layers, precision) for layers in (2, 4))
    saved = (four - two) / 2 / TOKENS / WIDTH
    assert saved == pytest.approx(SAVED[architecture][precision], rel=0.03)
    assert saved >= SAVED_BYTES[precision]


def saved_bytes(architecture: str, layers: int, precision: str) -> int:
    """Bytes that a forward pass of TOKENS tokens saves for its backward pass, without the parameters."""
    config = AutoConfig.for_model(
        architecture, vocab_size=300, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        **{"ffn_dim" if architecture == "opt" else "intermediate_size": 4 * WIDTH},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    own, kept = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        model.base_model(torch.randint(3, 200, (8, TOKENS // 8)))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_other_needs_are_checked_alike():
    check_memory(MILLION, 8 * MILLION, CPU, lambda _: 8 * MILLION)
    with pytest.raises(UserError, match=r"1\.0M parameters needs 0\.01 GiB"):
        check_memory(MILLION, 8 * MILLION, CPU, lambda _: 8 * MILLION - 1)
