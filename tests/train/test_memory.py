from __future__ import annotations

import pytest
import torch

from peer.errors import UserError
from peer.train.compute import Compute
from peer.train.memory import Footprint, ModelSize, activation_bytes, check_memory
from peer.train.model import measure_model
from peer.train.ranks import Ranks
from tests.train.test_compute import trained
from tests.train.tiny import SPEC

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB, MILLION = 2**30, 1_000_000
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
    assert whole == 4096 * (4 * 8 * 64 * 4 + 2 * 4 * 1000)
    half = activation_bytes(SIZE, 4096, CPU, Compute(precision="bf16"))
    assert half == 4096 * (2 * 8 * 64 * 4 + 2 * 4 * 1000)
    again = activation_bytes(SIZE, 4096, CPU, Compute(checkpointing=True))
    assert again == 4096 * (4 * 64 * 4 + 4 * 8 * 64 + 2 * 4 * 1000)
    many = activation_bytes(SIZE, 2**20, CPU, Compute())
    assert many == 2**20 * (4 * 8 * 64 * 4) + 2 * 2**26, "logits are made in parts"


def test_the_estimate_is_no_more_than_a_step_really_keeps():
    size, sizes = measure_model(SPEC, 259), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t):
        trained(Compute(), steps=1)
    logits = 4 * 16 * 264  # their gradient is not saved but made
    assert activation_bytes(size, 16, CPU, Compute()) - logits <= sum(sizes)


def test_other_needs_are_checked_alike():
    check_memory(MILLION, 8 * MILLION, CPU, lambda _: 8 * MILLION)
    with pytest.raises(UserError, match=r"1\.0M parameters needs 0\.01 GiB"):
        check_memory(MILLION, 8 * MILLION, CPU, lambda _: 8 * MILLION - 1)
