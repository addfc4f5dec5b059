from __future__ import annotations

import logging

import pytest
import torch

from peer.protocol.manifest import ModelSpec
from peer.train.batch import Batch
from peer.train.loss import LanguageLoss
from peer.train.model import build_model
from tests.train.architectures import tiny_config
from tests.train.test_batch import masked
from tests.train.tiny import tiny_model

ROWS = 3 * 4 * 264 * 8  # logits of three tokens of each of eight rows at a time


def gradient_of(model, batch, scale=1.0, **options):
    model.zero_grad()
    loss = LanguageLoss(model, **options).backward(batch, batch.tokens, scale)
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()
                         if parameter.grad is not None}


def same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2", "cohere", "granite", "gpt2", "gpt_neox", "mixtral", "mamba", "bloom"]
)
def test_a_chunked_loss_is_the_whole_one(architecture, caplog):
    """Caps, scales and biases of the logits included, and the auxiliary loss of a router."""
    model = build_model(ModelSpec(architecture=architecture, config=tiny_config(architecture)), 259, 3)
    model.train(False)  # dropout draws other numbers each time
    batch = masked()
    vocab_size = model.config.vocab_size
    with caplog.at_level(logging.INFO):
        loss, gradient = gradient_of(model, batch, logit_bytes=2**40)
        chunked_loss, chunked = gradient_of(model, batch, logit_bytes=3 * 4 * vocab_size * 8)
    assert not [text for text in caplog.messages if "all tokens at once" in text]
    assert chunked_loss == pytest.approx(loss, abs=1e-6)
    same(chunked, gradient)
    mean = LanguageLoss(model, logit_bytes=3 * 4 * vocab_size * 8).mean(batch)
    assert mean == pytest.approx(LanguageLoss(model).mean(batch), abs=1e-6) == pytest.approx(loss, abs=1e-6)


def test_a_model_that_cannot_be_cut_takes_all_logits_at_once(caplog):
    model = tiny_model()
    forward = model.forward
    model.forward = lambda input_ids, **more: forward(input_ids=input_ids.clone(), **more)  # needs ids of its own
    batch = masked()
    with caplog.at_level(logging.INFO):
        _, found = gradient_of(model, batch, logit_bytes=ROWS)
    assert [text for text in caplog.messages if "all tokens at once" in text]
    model.forward = forward
    same(found, gradient_of(model, batch)[1], tolerance=0.0)
    assert model.training


def test_the_model_is_whole_again_after_an_error():
    model, batch = tiny_model(), masked()
    modules = dict(model.named_modules())
    handle = model.model.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        gradient_of(model, batch, logit_bytes=ROWS)
    handle.remove()
    assert dict(model.named_modules()) == modules
    names = [name for name, _ in model.named_parameters()]
    gradient_of(model, batch, logit_bytes=ROWS)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_parts_have_no_gradient(frozen):
    config = {**tiny_config("llama"), "tie_word_embeddings": False}
    model, batch = build_model(ModelSpec(architecture="llama", config=config), 259, 3), masked()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    _, expected = gradient_of(model, batch)
    _, found = gradient_of(model, batch, logit_bytes=ROWS)
    assert all(not name.startswith(frozen) for name in found)
    same(found, expected)


def test_the_gradient_is_scaled():
    model, batch = tiny_model(), masked()
    for options in ({}, {"logit_bytes": ROWS}):
        loss, gradient = gradient_of(model, batch, **options)
        scaled_loss, scaled = gradient_of(model, batch, scale=64.0, **options)
        assert scaled_loss == loss
        same({name: value / 64.0 for name, value in scaled.items()}, gradient, tolerance=1e-6)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_the_routers_loss_is_the_models_own_or_the_manifests(architecture):
    config = tiny_config(architecture) | {"router_aux_loss_coef": 0.02}
    model = build_model(ModelSpec(architecture=architecture, config=config), 259, 3)
    batch = Batch.of(masked().inputs_bt)
    output = model(input_ids=batch.inputs_bt, labels=None, output_router_logits=True, use_cache=False)
    (0.02 * output.aux_loss).backward()
    name, router = next((n, p) for n, p in model.named_parameters() if "gate" in n and "proj" not in n)
    of_router = router.grad.clone()
    own, without = (gradient_of(model, batch, router_loss=weight) for weight in (None, 0.0))
    assert own[0] == without[0], "what is reported is the loss of the language"
    assert float(of_router.norm()) > 0
    assert torch.allclose(own[1][name] - without[1][name], of_router, atol=1e-7)
    double = gradient_of(model, batch, router_loss=0.04)
    assert torch.allclose(double[1][name] - without[1][name], 2 * of_router, atol=1e-7)


@pytest.mark.parametrize("architecture", ["doge", "flint"])
def test_a_router_that_has_a_weight_but_no_loss_trains_without(architecture, caplog):
    model = build_model(ModelSpec(architecture=architecture, config=tiny_config(architecture)), 259, 3)
    with caplog.at_level(logging.INFO):
        _, gradient = gradient_of(model, masked(tokens=6))
    assert [text for text in caplog.messages if "has no auxiliary loss" in text]
    assert gradient
    assert model.training
