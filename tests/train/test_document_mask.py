"""Packed documents whose attention stays inside them learn what unpacked ones do."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from peer.errors import UserError
from peer.protocol.manifest import ModelSpec
from peer.train.batch import IGNORED, Batch
from peer.train.loss import LanguageLoss
from peer.train.model import check_trains

END = 1
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": END,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "qwen3": {"head_dim": 8}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "gpt_neox": {},
    "gemma": {"head_dim": 8}, "mixtral": {"num_local_experts": 2},
}  # fmt: skip
DOCUMENTS = (5, 1, 9, 17)


def built(name: str, **config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    whole = AutoConfig.for_model(name, **{**SMALL, **config})
    return AutoModelForCausalLM.from_config(whole, dtype=torch.float32)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    bodies = [torch.randint(2, 64, (length,), generator=generator) for length in DOCUMENTS]
    return [torch.cat([body, torch.tensor([END])]) for body in bodies]


def gradient(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_have_the_loss_and_the_gradient_of_unpacked_ones(name):
    model = built(name, **FAMILIES[name]).train(False)
    packed = torch.cat(documents()).unsqueeze(0)
    batch = Batch.of(packed, END)
    assert batch.tokens == sum(DOCUMENTS)
    loss = LanguageLoss(model, router_loss=0.0)
    together = loss.backward(batch, batch.tokens)
    expected = gradient(model)
    model.zero_grad()
    alone = sum(loss.backward(Batch.of(one.unsqueeze(0)), batch.tokens) for one in documents())
    assert together.item() == pytest.approx(float(alone), abs=1e-5)
    assert torch.allclose(gradient(model), expected, atol=1e-5)
    model.zero_grad()
    loss.backward(Batch.of(packed), packed.shape[1] - 1)  # without a mask it is another gradient
    assert not torch.allclose(gradient(model), expected, atol=1e-3)


def test_positions_begin_again_behind_each_end_and_nothing_is_predicted_from_it():
    rows = torch.tensor([[5, 6, END, 7, END, END, 8, 9], [END, 4, 4, 4, 4, 4, END, 3]])
    batch = Batch.of(rows, END)
    assert batch.positions_bt.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert batch.labels_bt.tolist() == [
        [6, END, IGNORED, END, IGNORED, IGNORED, 9], [IGNORED, 4, 4, 4, 4, END, IGNORED],
    ]  # fmt: skip
    cuts = batch.micro_batches(1)
    assert [cut.positions_bt.tolist() for cut in cuts] == [[row] for row in batch.positions_bt.tolist()]
    assert torch.equal(batch.to(torch.device("cpu")).positions_bt, batch.positions_bt)


@pytest.mark.parametrize("name", ["mamba", "opt", "bloom"])
def test_a_model_that_cannot_keep_inside_a_document_is_refused(name):
    more = {"mamba": {}, "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48}, "bloom": {"n_head": 4, "n_layer": 2}}[name]
    model, spec = built(name, **more), ModelSpec(architecture=name)
    check_trains(spec, model, 32)
    with pytest.raises(UserError, match=f"{name} cannot keep attention inside a document") as caught:
        check_trains(spec, model, 32, END)
    assert "data.document_mask" in caught.value.hint


@pytest.mark.parametrize("name", FAMILIES)
def test_the_others_are_accepted(name):
    check_trains(ModelSpec(architecture=name), built(name, **FAMILIES[name]), 32, END)
