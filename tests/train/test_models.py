"""Families that differ in what a trainer could get wrong, trained and exported."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from peer.checkpoint.export import export_model
from peer.data.tokenizer import load_tokenizer
from peer.protocol.manifest import InnerSpec, ModelSpec, TokenizerSpec
from peer.train.batch import Batch
from peer.train.compute import Compute
from peer.train.loss import LanguageLoss
from peer.train.model import build_model, check_trains
from peer.train.optim import build_optimizer
from peer.train.step import Trainer
from tests.train.architectures import tiny_config

INNER = InnerSpec(learning_rate=1e-2)
STEPS = 20
# What is special: grouped heads; norms of queries and keys; learned positions, tied weights; parallel blocks; scaled
# embeddings; soft caps; experts with a router; many small experts; no attention at all; slopes in place of positions;
# made for looking both ways.
FAMILIES = {
    "llama": {}, "qwen3": {}, "gpt2": {}, "gpt_neox": {}, "gemma": {}, "gemma2": {}, "mixtral": {}, "qwen3_moe": {},
    "mamba": {}, "bloom": {}, "bert": {"is_decoder": True},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_learns_and_what_it_learned_is_exported(tmp_path, architecture):
    spec = ModelSpec(architecture=architecture, config=tiny_config(architecture) | FAMILIES[architecture])
    tokenizer = load_tokenizer(TokenizerSpec())
    model = build_model(spec, tokenizer.vocab_size, 1)
    check_trains(spec, model, 16)
    compute = Compute(micro_batch=2)
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 1e-2, compute=compute)
    batch = torch.randint(3, 259, (4, 17), generator=torch.Generator().manual_seed(2))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results = [trainer.step(batch) for _ in range(STEPS)]
    assert not any(result.skipped for result in results)
    assert results[-1].loss < 0.8 * results[0].loss
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    path = export_model(model, tokenizer, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    held = Batch.of(batch)
    ours, theirs = (LanguageLoss(one.train(False)).mean(held) for one in (model, loaded))
    assert theirs == pytest.approx(ours, abs=1e-5)


def test_an_expert_that_no_token_chose_is_left_as_it_is_and_the_others_learn():
    config = tiny_config("mixtral") | {"num_local_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.0}
    spec = ModelSpec(architecture="mixtral", config=config)
    model = build_model(spec, 259, 1)
    inner = InnerSpec(learning_rate=1e-2, weight_decay=0.0)
    trainer = Trainer(model, build_optimizer(model, inner), inner, lambda: 1e-2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "experts" in name}
    result = trainer.step(torch.full((1, 2), 5))
    assert not result.skipped
    for name, parameter in model.named_parameters():
        if name in before:
            changed = [not torch.equal(a, b) for a, b in zip(parameter, before[name], strict=True)]
            assert sum(changed) == 1, name
