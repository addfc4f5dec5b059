from __future__ import annotations

import pytest
import torch

from peer.errors import UserError
from peer.protocol.manifest import InnerSpec, ModelSpec
from peer.train.adam8bit import AdamW8bit, Quantized
from peer.train.model import build_model
from peer.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors, reset_state, state_is_finite
from peer.train.step import Trainer
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(learning_rate=1e-2)
CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 264,
}  # fmt: skip


def trainer_of(eight_bit: bool) -> Trainer:
    model = build_model(ModelSpec(architecture="llama", config=CONFIG), 259, 7)
    optimizer = build_optimizer(model, INNER, eight_bit)
    return Trainer(model, optimizer, INNER, lambda: 1e-2)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 256, 1000])
def test_codes_are_near_and_stay_the_same_when_they_are_made_again(signed, numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).pow_(3)
    x = x if signed else x.abs()
    first = Quantized.of(x, signed)
    back = first.dequantize()
    again = Quantized.of(back, signed)
    assert torch.equal(again.codes, first.codes)
    assert torch.equal(again.dequantize(), back)
    assert float((back - x).abs().max()) <= 0.02 * float(x.abs().max())
    if not signed:
        assert bool((back >= x * (1 - 1e-2)).all()), "rounded up: Adam divides by it"


def test_zeros_and_tiny_values_are_finite():
    for x in (torch.zeros(300), torch.full((300,), 1e-38)):
        for signed in (True, False):
            assert bool(Quantized.of(x, signed).dequantize().isfinite().all())


def test_it_learns_as_adamw_does_with_a_quarter_of_its_memory():
    (batch,) = random_batches(1)
    found = {}
    for eight_bit in (False, True):
        trainer = trainer_of(eight_bit)
        found[eight_bit] = [trainer.step(batch).loss for _ in range(30)]
    assert found[True][0] == found[False][0]
    assert found[True][-1] == pytest.approx(found[False][-1], abs=0.05 * found[False][0])
    optimizer = trainer.optimizer
    assert isinstance(optimizer, AdamW8bit)
    large = [state for parameter, state in optimizer.state.items() if parameter.numel() >= 4096]
    sizes = [q.codes.nbytes + q.scales.nbytes for state in large for q in (state["exp_avg"], state["exp_avg_sq"])]
    assert sum(sizes) < 0.27 * sum(8 * parameter.numel() for parameter in optimizer.state if parameter.numel() >= 4096)


def test_saved_state_continues_bit_for_bit():
    batches = random_batches(6)
    whole = trainer_of(True)
    for batch in batches:
        whole.step(batch)
    first, second = trainer_of(True), trainer_of(True)
    for batch in batches[:3]:
        first.step(batch)
    second.model.load_state_dict(first.model.state_dict())
    load_optimizer_tensors(second.optimizer, optimizer_tensors(first.optimizer))
    for batch in batches[3:]:
        second.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


def test_a_checkpoint_goes_from_one_to_the_other():
    first, second = trainer_of(False), trainer_of(True)
    (batch,) = random_batches(1)
    first.step(batch)
    load_optimizer_tensors(second.optimizer, optimizer_tensors(first.optimizer))
    assert optimizer_tensors(second.optimizer).keys() == optimizer_tensors(first.optimizer).keys()
    assert state_is_finite(second.optimizer)
    reset_state(second.optimizer)
    assert optimizer_tensors(second.optimizer) == {}


def test_it_is_for_adamw_alone():
    with pytest.raises(UserError, match="adam_8bit=True: the run trains with muon"):
        build_optimizer(tiny_model(), InnerSpec(optimizer="muon"), eight_bit=True)
